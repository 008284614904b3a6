"""DeepSpeed configs by name."""

from __future__ import annotations

import pytest

from ds_distill.engine import config, precision
from ds_distill.errors import UserError


@pytest.mark.parametrize("computes", [True, False])
def test_auto_is_bf16_where_the_device_computes_in_it(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "computes_bf16", lambda: computes)
    for stage in range(4):
        _, found = config.find_config(f"zero{stage}_auto")
        assert (precision.dtype_name(found) == "bfloat16") == computes
        assert config.zero_stage(found) == stage
        exact = config.find_config(f"zero{stage}_{'bf16' if computes else 'fp32'}")
        assert found == exact[1]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'zero9_auto' is neither .* zero0_bf16, zero0_fp32"):
        config.find_config("zero9_auto")
    for name in ("z" * 300, "z" * 300 + "_auto"):  # no file has such a name
        with pytest.raises(UserError, match="is neither a file nor a built-in config"):
            config.find_config(name)


def test_this_machine_gives_an_answer() -> None:
    assert precision.resolved_name("zero1_auto") in ("zero1_bf16", "zero1_fp32")
    assert precision.resolved_name("my_auto.json") == "my_auto.json"
