"""What the documents show of studies is what their files hold."""

import json
from pathlib import Path

import entity_experts
import label_experts
import label_sets
import pytest
import routing
import routing_rule
import torch
import transformers as tr
from pages import shown

STUDIES = {
    study.MARK: (study.RESULTS, study.PAGE, study.MARK, study.tables)
    for study in (entity_experts, label_experts, label_sets, routing)
}
STUDIES |= {
    routing.RULE_MARK: (routing.RESULTS, routing.RULE_PAGE, routing.RULE_MARK, routing.rule_table),
    routing_rule.MARK: (
        *(routing.RESULTS, routing_rule.PAGE, routing_rule.MARK),
        lambda _: routing_rule.text(),  # of other files, too
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_shows_what_the_file_holds(name):
    """The commit of each run among it, and no folder of a machine."""
    results, page, mark, tables = STUDIES[name]
    text = results.read_text()
    runs = json.loads(text)["runs"]
    assert shown(page, mark) == tables(runs)
    for run in runs:
        assert len(run["environment"]["commit"].removesuffix("+changes")) == 40
    assert "/tmp/" not in text and str(Path.home()) not in text


def test_an_expert_of_all_tags_is_sure_that_what_it_does_not_know_is_o():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    own, labels = ["O", "B-b", "I-b"], ["O", "B-a", "I-a", "B-b", "I-b"]
    config = tr.BertConfig(
        vocab_size=20, intermediate_size=8, id2label=dict(enumerate(own)), **sizes
    )
    expert = tr.BertForTokenClassification(config).eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        before = expert(ids).logits.softmax(-1)
        wide = entity_experts.with_all_tags(expert, labels)
        after = wide(ids).logits.softmax(-1)
    torch.testing.assert_close(after[..., [0, 3, 4]], before)
    assert after[..., [1, 2]].max() < 1e-9
    assert list(wide.config.id2label.values()) == labels
    assert wide.config.label2id == {label: n for n, label in enumerate(labels)}
