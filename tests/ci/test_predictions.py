"""Teachers whose predictions are in a file."""

from runs import losses, run_here
from unit.test_predictions import with_answers


def test_a_live_file_teaches_what_a_cached_one_does(toy_settings, tmp_path, in_this_process):
    """Alone in the engine beside the student, under the stage that looks a whole step's up at
    once."""
    settings = with_answers(toy_settings, tmp_path)
    del settings["teachers"]["second"], settings["phases"][0]
    settings["phases"][0]["cache"]["dtype"] = "float32"
    settings["phases"][2]["distil"] |= {"routing": "average", "micro_batch_size": 8, "epochs": 1}
    cached = run_here(settings, tmp_path / "cached", "deepspeed=zero3_fp32")
    live = run_here(
        settings, tmp_path / "live", "deepspeed=zero3_fp32", "phases.distil.teachers=live"
    )
    of_cached, of_live = (losses(run, "student") for run in (cached, live))
    assert of_cached == of_live and len(of_live) > 1
