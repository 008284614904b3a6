"""Families of encoders that few distil."""

import pytest
from unit.test_families import MASKED_LM_FAMILIES, USUAL, check_head_at_rows, check_kept_layers
from unit.test_students import RESIZED, TRUNCATED, check_resized, check_truncated
from unit.test_students import USUAL as USUAL_STUDENTS

from ds_distill.models.layers import NOT_CUT


@pytest.mark.parametrize("family", [name for name in MASKED_LM_FAMILIES if name not in USUAL])
def test_the_head_at_rows_is_the_models_own(family):
    check_head_at_rows(family, {})


@pytest.mark.parametrize(
    "family", [name for name in (*MASKED_LM_FAMILIES, "rembert") if name not in NOT_CUT]
)
def test_kept_layers_are_those_of_the_model_that_is_loaded_again(family, tmp_path):
    check_kept_layers(family, tmp_path)


@pytest.mark.parametrize("family", [name for name in RESIZED if name not in USUAL_STUDENTS])
def test_a_random_student_has_the_sizes_that_were_asked_for(family, tmp_path):
    check_resized(family, tmp_path)


@pytest.mark.parametrize("family", [name for name in TRUNCATED if name not in USUAL_STUDENTS])
def test_a_truncated_student_has_the_first_rows_and_columns(family, tmp_path):
    check_truncated(family, tmp_path)
