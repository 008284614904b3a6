"""Terms on attention: distributions, scores and relations of every token, without a map of all
pairs of tokens in memory where the loss can do without."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_distill.losses.hidden import LayeredTerm
from ds_distill.losses.term import DEFAULTS, NO_INPUTS, TermInputs
from ds_distill.reads import TOKENS, AttentionInputs, Reads
from ds_distill.recipe.terms import (
    AttentionKLLoss,
    AttentionMSELoss,
    AttentionSettings,
    RelationKLLoss,
)
from ds_distill.seen import Seen
from ds_distill.views import PaddedView
from ds_kernels import attention_kl, relation_kl

_MAP_BYTES = 1 << 22
"""Of the float32 maps that are alive at a time, of one model. A step has some copies of them."""


class AttentionTerm(LayeredTerm):
    """A loss of every token that compares the attention of layers with that of the one teacher's:
    summed over pairs of layers, a mean over heads. A token beyond the length of the shorter view is
    padding in both."""

    kind: type[AttentionSettings]
    rows = TOKENS

    def __init__(
        self,
        settings: AttentionSettings | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.5}.
        inputs: numbers of layers, which `layers: last` does not need.
        """
        settings = self.kind.model_validate(settings)
        [depth] = inputs.teacher_depths.values() or [0]
        super().__init__(settings, {"": settings.pairs(inputs.student_depth, depth)})

    def of_layers(self, layers: Collection[int]) -> Reads:
        return Reads(queries=layers, keys=layers, logits=False)

    @abstractmethod
    def of_pair(self, student: AttentionInputs, teacher: AttentionInputs) -> torch.Tensor:
        """The loss of each token: float32 [B, S], anything at padding."""

    def forward(self, seen: Seen) -> torch.Tensor:
        if (count := len(seen.teachers)) != 1:
            raise ValueError(f"a term on attention takes one teacher, and here are {count}")
        [(name, taught)] = seen.teachers.items()
        losses = []
        for own, other in self.pairs[""]:
            if other not in taught.attention:
                raise ValueError(
                    f"a term on attention reads layer {other} of teacher {name!r}, and the batch "
                    "has none: no cache holds it; give the bundle the teacher"
                )
            both = _aligned(seen.student.attention[own], taught.attention[other])
            losses.append(self.of_pair(*both))
        view = seen.batch.views["student"]
        assert isinstance(view, PaddedView) and view.positions is not None
        position = view.positions[seen.batch.row_sets[self.rows]]
        total = torch.stack(losses).sum(dim=0)
        return self.tolerated(self.weight * total[position // view.length, position % view.length])


def _aligned(
    student: AttentionInputs, teacher: AttentionInputs
) -> tuple[AttentionInputs, AttentionInputs]:
    """Both with the positions that both have: the others are padding. Raises ValueError for other
    examples."""
    shapes = student.mask.shape, teacher.mask.shape
    if shapes[0][0] != shapes[1][0]:
        raise ValueError(f"attention of student {[*shapes[0]]} and teacher {[*shapes[1]]} tokens")
    common = min(shape[1] for shape in shapes)
    examples = shapes[0][0]
    return student.of_examples(0, examples, common), teacher.of_examples(0, examples, common)


class AttentionKL(AttentionTerm):
    """sum over pairs (i, j) of 1/A sum over heads a of KL(A_t[j, a] || A_s[i, a]) of each token's
    attention, A = softmax(Q K^T / sqrt(d)).

    Of the last layers MiniLM's attention transfer (Wang et al. 2020, equation 4), of all
    CompactBioBERT's (Rohanian et al. 2023, equation 10) and MobileBERT's (Sun et al. 2020, equation
    3, a mean over layers).
    """

    kind = AttentionKLLoss

    def of_pair(self, student: AttentionInputs, teacher: AttentionInputs) -> torch.Tensor:
        return attention_kl(
            _there(student.queries),
            _there(student.keys),
            _there(teacher.queries),
            _there(teacher.keys),
            student.mask,
            student_scale=student.scale,
            teacher_scale=teacher.scale,
            reduction="none",
        ).mean(dim=1)


class RelationKL(AttentionTerm):
    """sum over pairs (i, j) and X of queries, keys, values of 1/R sum over relation heads r of
    KL(R_t[j, r] || R_s[i, r]), R = softmax(X X^T / sqrt(d_r)).

    MiniLMv2 (Wang et al. 2021, equations 3 to 6), of all three in one number of relation heads; of
    the values in the attention's own heads MiniLM's value relations (Wang et al. 2020, equation 5).
    """

    kind = RelationKLLoss

    def of_layers(self, layers: Collection[int]) -> Reads:
        return Reads(logits=False, **dict.fromkeys(self.settings.of, layers))

    def of_pair(self, student: AttentionInputs, teacher: AttentionInputs) -> torch.Tensor:
        losses = []
        heads = self.settings.heads
        for name in self.settings.of:
            own, other = (_there(getattr(of, name)) for of in (student, teacher))
            if heads is None and own.shape[1] != other.shape[1]:
                raise ValueError(
                    f"relations of {own.shape[1]} heads and of {other.shape[1]}: set `heads`"
                )
            losses.append(
                relation_kl(
                    own.transpose(1, 2).flatten(2),
                    other.transpose(1, 2).flatten(2),
                    student.mask,
                    heads=heads or own.shape[1],
                    reduction="none",
                ).mean(dim=1)
            )
        return torch.stack(losses).sum(dim=0)


class AttentionMSE(AttentionTerm):
    """sum over pairs (i, j) of 1/A sum over heads a of the mean over keys of
    (A_s[i, a] - A_t[j, a])^2 at each query: of one text TinyBERT's mean over both (Jiao et al.
    2020, equation 7), with A the scores Q K^T / sqrt(d) before the softmax; or behind it, `of:
    maps` (Rohanian et al. 2023, equation 6).

    Of scores no map is made: a row's sum is x^T (Y^T Y) x, with x = [s_s q_s, -s_t q_t] and rows
    [k_s, k_t] of Y. Maps are made some at a time, and again in the backward pass.
    """

    kind = AttentionMSELoss

    def of_pair(self, student: AttentionInputs, teacher: AttentionInputs) -> torch.Tensor:
        heads = [_there(of.queries).shape[1] for of in (student, teacher)]
        if heads[0] != heads[1]:
            raise ValueError(f"attention of {heads[0]} heads and of {heads[1]}")
        mask = student.mask[:, None, :, None]
        query_s, key_s, query_t, key_t = (
            part.masked_fill(~mask, 0).float()
            for of in (student, teacher)
            for part in (_there(of.queries) * of.scale, _there(of.keys))
        )
        with torch.autocast(mask.device.type, enabled=False):
            if self.settings.of == "scores":
                return _score_distance(query_s, key_s, query_t, key_t, student.mask)
            return _map_distance(query_s, key_s, query_t, key_t, student.mask)


def _score_distance(
    query_s: torch.Tensor,
    key_s: torch.Tensor,
    query_t: torch.Tensor,
    key_t: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """[B, S]: the mean over heads and real keys of (q_s . k_s - q_t . k_t)^2; all are 0 at padding,
    float32 [B, A, S, D], and queries are scaled."""
    x, y = torch.cat([query_s, -query_t], dim=-1), torch.cat([key_s, key_t], dim=-1)
    sums = ((x @ (y.mT @ y)) * x).sum(dim=-1).mean(dim=1)
    return sums / mask.sum(dim=1, keepdim=True)


def _map_distance(
    query_s: torch.Tensor,
    key_s: torch.Tensor,
    query_t: torch.Tensor,
    key_t: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """[B, S]: the mean over heads and real keys of the squared difference of attention maps; inputs
    as of `_score_distance`."""
    examples, heads, length, _ = query_s.shape
    each = max(1, _MAP_BYTES // (4 * length * length))
    hidden = ~mask.repeat_interleave(heads, dim=0)[:, None]
    of_heads = [part.flatten(0, 1) for part in (query_s, key_s, query_t, key_t)]
    # Not by slices, of which each has a gradient as large as the whole.
    parts = zip(*(part.split(each) for part in (*of_heads, hidden)), strict=True)
    sums = [
        checkpoint(_map_sums, *part, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    mean = torch.cat(sums).unflatten(0, (examples, heads)).mean(dim=1)
    return mean / mask.sum(dim=1, keepdim=True)


def _map_sums(
    query_s: torch.Tensor,
    key_s: torch.Tensor,
    query_t: torch.Tensor,
    key_t: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """[n, S]: the sum over keys of the squared difference of n heads' maps, of float32 [n, S, D];
    hidden: bool [n, 1, S], the keys that are padding."""
    maps = [
        (query @ key.mT).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
        for query, key in ((query_s, key_s), (query_t, key_t))
    ]
    return (maps[0] - maps[1]).square().sum(dim=-1)


def _there(part: torch.Tensor | None) -> torch.Tensor:
    """A part of attention's inputs. Raises ValueError where it was not asked for."""
    if part is None:
        raise ValueError("the model was not asked for this part of its attention")
    return part
