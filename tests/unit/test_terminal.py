"""What strangers have named is shown on a terminal, not obeyed."""

import io
import json
import sys
from types import SimpleNamespace

from ds_distill.process.terminal import LONGEST, escaped, message, say
from ds_distill.run import events
from ds_distill.run.events import RunLog

HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\u202ec\r\u2066\ud83d\x7f"
SHOWN = r"a\u001b]0;title\u0007\u001b[2Jb\u009b31m\u202ec\u000d\u2066\ud83d\u007f"


def test_active_characters_are_shown():
    assert escaped(HOSTILE) == SHOWN
    assert escaped("naïve\n\t– 中文 👩\u200d🚀") == "naïve\n\t– 中文 👩\u200d🚀"
    assert json.loads(escaped(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {"a": HOSTILE}


def test_a_long_message_keeps_its_begin_and_its_fix():
    text = "recipe.yaml: labels " + "a" * 10_000 + ". Name fewer."
    shown = message(text)
    assert len(shown) < LONGEST + 50
    assert shown.startswith("recipe.yaml: labels ") and shown.endswith(". Name fewer.")
    assert "[... 8,033 characters ...]" in shown
    assert message("b" * LONGEST) == "b" * LONGEST


def log_of(folder):
    logging = SimpleNamespace(wandb=None, tensorboard=False)
    return RunLog(folder, SimpleNamespace(logging=logging), enabled=True, resumed=False)


def test_commands_and_runs_print_them_so(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(events, "PLAIN_LINE_SECONDS", -1.0)
    say(HOSTILE)
    say(HOSTILE, error=True)
    log = log_of(tmp_path)
    log.info(HOSTILE)
    with log.bar(HOSTILE, 2) as bar:
        bar.advance()
    out, error = capfd.readouterr()
    assert error == SHOWN + "\n"
    assert out.count(SHOWN) == 3
    assert not set(out) & set("\x1b\x07\x9b\u202e\r\u2066\x7f")


def test_what_rich_adds_stays(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log._console.file = io.StringIO()
    log._console._force_terminal = True
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with log.bar(HOSTILE, 2):
        log.info(HOSTILE)
    written = log._console.file.getvalue()
    assert "\x1b[?25l" in written, "it hides the cursor"
    assert r"\u001b[2Jb\u009b31m\u202ec" in written and "\u202e" not in written
