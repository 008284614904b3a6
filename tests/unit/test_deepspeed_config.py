"""DeepSpeed configs by name."""

import json
import os
import runpy

import pytest
from deepspeed.accelerator import get_accelerator
from processes import python

from ds_distill.engine import config, config_file, precision
from ds_distill.errors import UserError
from ds_distill.recipe.training import Training


@pytest.mark.parametrize("computes", [True, False])
def test_auto_is_bf16_where_the_device_computes_in_it(computes, monkeypatch):
    monkeypatch.setattr(precision, "computes_bf16", lambda: computes)
    for stage in range(4):
        _, found = config.find_config(f"zero{stage}_auto")
        assert (precision.dtype_name(found) == "bfloat16") == computes
        assert config.zero_stage(found) == stage
        exact = config.find_config(f"zero{stage}_{'bf16' if computes else 'fp32'}")
        assert found == exact[1]


@pytest.mark.parametrize(("for_device", "computes"), [(True, True), (True, False), (False, True)])
def test_what_a_file_leaves_open_is_as_without_it(for_device, computes, tmp_path, monkeypatch):
    """As files of transformers' Trainer do; bf16 is then as with `_auto`."""
    monkeypatch.setattr(config_file, "computes_bf16", lambda: computes)
    file = tmp_path / "zero.json"
    zero = {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True}
    zero["offload_optimizer"] = {"device": "none"}
    given = {"train_batch_size": "auto", "steps_per_print": 2000, "gradient_clipping": "auto"}
    given |= {half: {"enabled": "auto"} for half in ("bf16", "fp16")}
    file.write_text(json.dumps({**given, "zero_optimization": zero}))
    found = config.deepspeed_config(str(file), Training(batch_size=16), 1, for_device=for_device)
    half = for_device and computes
    assert (precision.dtype_name(found) == "bfloat16") == found["bf16"]["enabled"] == half
    assert found["train_batch_size"] == 16 and found["steps_per_print"] == 2000
    assert "auto" not in json.dumps(found)
    assert config.zero_stage(found) == 2 and found["zero_optimization"]["overlap_comm"]


def test_deepspeed_is_imported_for_files_alone():
    """It takes seconds."""
    code = "from ds_distill.engine.config import find_config; import sys; find_config('zero1_fp32')"
    code += "; sys.exit('deepspeed' in sys.modules)"
    python(code)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"'zero9_auto' is neither .* zero0_bf16, zero0_fp32"):
        config.find_config("zero9_auto")
    for name in ("z" * 300, "z" * 300 + "_auto"):  # no file has such a name
        with pytest.raises(UserError, match="is neither a file nor a built-in config"):
            config.find_config(name)


@pytest.mark.parametrize("named", [None, "cuda"])
def test_deepspeed_takes_the_cpu_where_there_is_no_gpu_and_none_is_named(named, monkeypatch):
    """The environment is afterwards as it was."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    seen = []
    monkeypatch.setattr(
        "deepspeed.accelerator.get_accelerator", lambda: seen.append(os.environ["DS_ACCELERATOR"])
    )
    if named is None:
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    else:
        monkeypatch.setenv("DS_ACCELERATOR", named)
    runpy.run_module("ds_distill.engine.accelerator")
    assert seen == (["cpu"] if named is None else [])
    assert os.environ.get("DS_ACCELERATOR") == named


@pytest.mark.parametrize(
    ("name", "supported", "refused"),
    [("fp16", False, True), ("fp16", True, False), ("bf16", False, False), ("fp32", False, False)],
)
def test_fp16_needs_a_device_that_computes_in_it(name, supported, refused, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: supported)
    _, found = config.find_config(f"zero1_{name}")
    if refused:
        with pytest.raises(UserError, match="fp16"):
            precision.check_device("mine", found)
    else:
        precision.check_device("mine", found)
