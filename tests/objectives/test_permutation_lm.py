"""Permutation language modeling: what a prediction depends on, what is remembered, and what is refused."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from discern.corruption.permutation import factorization_order
from discern.data.batching.rows import heldout_rows, training_rows
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.objectives.masked import MaskedLanguageModel, MLMConfig
from discern.objectives.permutation_lm import PermutationLanguageModel, PermutationLMConfig
from discern.training.config import load_pretrain_config
from discern.types import CorruptedBatch, TokenBatch
from tests.objectives.test_conformance import randomness, run
from tests.support import MODELS, SPECIAL, MemorySplit, make_batch, random_documents, settings

LENGTH, PART = 24, 12
SPLIT = MemorySplit(random_documents(80, 50, seed=2), begins=lambda token: token % 3 != 0)
DATA = DataConfig(sequence_length=LENGTH, packing="two-part")
# Large weights, so that what may be seen shows in what is predicted.
LARGE_WEIGHTS = MODELS["permutation-lm"] | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.3}


def build(model: dict[str, Any] | None = None, **options: Any) -> PermutationLanguageModel:
    objective = PermutationLanguageModel(PermutationLMConfig(**options), settings(50, **LARGE_WEIGHTS | (model or {})))
    objective.initialize(0)
    return objective


def rows(step: int, data: DataConfig = DATA) -> TokenBatch:
    return training_rows(SPLIT, SPECIAL, data, 0, slots=4).batch(step * 4 + np.arange(4), np.arange(4))


def logits_of(objective: PermutationLanguageModel, tokens: TokenBatch, step: int = 0) -> Tensor:
    with torch.no_grad():
        return run(objective, tokens, step).observations["permutation_lm_logits"]


def changed_targets(objective: PermutationLanguageModel, batch: CorruptedBatch, row: int, position: int) -> list[bool]:
    """Whether the logits of each target change with the token at one position."""
    ids = batch.tokens.input_ids.clone()
    ids[row, position] = 5 + (ids[row, position] - 4) % 45
    edited = replace(batch, tokens=replace(batch.tokens, input_ids=ids), masked_ids=ids)
    numbers = randomness(batch.tokens)
    with torch.no_grad():
        before, after = (objective(each, numbers).observations["permutation_lm_logits"] for each in (batch, edited))
    changes: list[bool] = (before != after).any(1).tolist()
    return changes


@pytest.mark.parametrize("permutation_size", [None, 6])
def test_a_prediction_depends_on_earlier_targets_and_the_context_of_its_own_and_the_first_part(
    permutation_size: int | None,
) -> None:
    objective, tokens = build(permutation_size=permutation_size).eval(), rows(0).rows(0, 2)
    batch = objective.corrupt(tokens, randomness(tokens))
    targets = batch.masked_positions.nonzero().tolist()
    order = factorization_order(LENGTH, PART, permutation_size, randomness(tokens))
    visible_targets = 0
    for row, position in (~tokens.special_tokens_mask).nonzero().tolist():
        is_target = bool(batch.masked_positions[row, position])
        expected = []
        for target_row, target in targets:
            same_part = (position < PART) == (target < PART)
            earlier = not is_target or bool(order[row, position] < order[row, target])
            expected.append(row == target_row and ((same_part and earlier) or position < PART <= target))
        assert changed_targets(objective, batch, row, position) == expected
        visible_targets += sum(expected) if is_target else 0
    assert visible_targets > 2


def test_documents_of_a_packed_row_see_nothing_of_each_other() -> None:
    objective = build(span_targets=False).eval()
    tokens = training_rows(SPLIT, SPECIAL, DataConfig(sequence_length=64, packing="packed"), 0).batch(np.arange(4), np.arange(4))
    assert tokens.document_ids is not None
    batch = objective.corrupt(tokens, randomness(tokens))
    targets = batch.masked_positions.nonzero().tolist()
    other_documents = 0
    for row, position in (~tokens.special_tokens_mask).nonzero()[::7].tolist():
        for (target_row, target), changes in zip(targets, changed_targets(objective, batch, row, position), strict=True):
            same = tokens.document_ids[row, target] == tokens.document_ids[row, position]
            assert not changes or (row == target_row and same)
            other_documents += int(row == target_row and not same)
    assert other_documents > 20, "rows of one document would prove nothing"


def test_a_target_that_sees_nothing_leaks_nothing() -> None:
    # One token between the special ones: it is the target, it may see nobody, and there is no memory.
    objective = build().eval()
    one, another = make_batch([[SPECIAL.cls, 9, SPECIAL.sep]]), make_batch([[SPECIAL.cls, 31, SPECIAL.sep]])
    for step in range(20):
        assert torch.equal(*(logits_of(objective, tokens, step) for tokens in (one, another)))
    numbers = [randomness(one, step) for step in range(20)]
    assert not all(objective.visible(objective.corrupt(one, each), each)[0, 1].any() for each in numbers)


def test_the_label_is_the_token_at_the_target() -> None:
    objective, tokens = build(), rows(0)
    batch = objective.corrupt(tokens, randomness(tokens))
    assert torch.equal(batch.masked_ids, tokens.input_ids), "the text is not changed"
    assert torch.equal(run(objective, tokens).observations["permutation_lm_targets"], tokens.input_ids[batch.masked_positions])
    assert batch.num_masked == 4 * (LENGTH // 6)


def test_a_memory_holds_the_newest_first_parts_of_its_slot_only() -> None:
    """The lowest layer remembers its input, which without dropout is the embeddings of the text that was read."""
    objective, second_part_differs, row_differs = (build(memory_length=18) for _ in range(3))
    for step in range(3):
        tokens = rows(step)
        ids = tokens.input_ids
        run(objective, tokens, step)
        flipped = torch.cat([ids[:, :PART], ids[:, PART:].flip(1)], 1)
        run(second_part_differs, replace(tokens, input_ids=flipped), step)
        run(row_differs, replace(tokens, input_ids=torch.cat([ids[:2], ids[2:3].flip(1), ids[3:]])), step)
    for slot in range(4):
        read = torch.cat([rows(step).input_ids[slot, :PART] for step in range(3)])[-18:]
        memory, unchanged, of_row = (o.carry_state()[f"memory.slot{slot}"] for o in (objective, second_part_differs, row_differs))
        torch.testing.assert_close(memory[0], objective.encoder.embeddings.words(read[None])[0])
        assert torch.equal(memory, unchanged)
        assert torch.equal(memory, of_row) == (slot != 2)
    first, second = (logits_of(o, rows(3), 3) for o in (objective, row_differs))
    target_rows = objective.corrupt(rows(3), randomness(rows(3), 3)).masked_positions.nonzero()[:, 0]
    assert target_rows[(first != second).any(1)].unique().tolist() == [2]


def test_a_memory_begins_with_zeros_that_are_attended_to() -> None:
    assert not torch.equal(logits_of(build(), rows(0)), logits_of(build(memory_length=18), rows(0)))


def test_micro_batches_remember_what_the_whole_does() -> None:
    whole, parts = build(memory_length=18), build(memory_length=18)
    for step in range(3):
        tokens = rows(step)
        total = run(whole, tokens, step).terms["permutation_lm"].total
        pieces = [run(parts, tokens.rows(start, start + 2), step).terms["permutation_lm"].total for start in (2, 0)]
        torch.testing.assert_close(torch.stack(pieces).sum(), total)
    torch.testing.assert_close(parts.carry_state(), whole.carry_state())


def test_what_is_carried_comes_back() -> None:
    objective, other = build(memory_length=18), build(memory_length=18)
    for step in range(2):
        run(objective, rows(step), step)
    state = {name: tensor.clone() for name, tensor in objective.carry_state().items()}
    other.load_carry_state(state)
    assert other.carry_state().keys() == state.keys() == {f"memory.slot{slot}" for slot in range(4)}
    assert torch.equal(*(logits_of(o, rows(2), 2) for o in (objective, other)))
    # A rank that has two of the slots carries those two on.
    other.load_carry_state(state)
    run(other, rows(2).rows(0, 2), 2)
    assert sorted(other.carry_state()) == ["memory.slot0", "memory.slot1"]


def test_evaluation_neither_reads_nor_changes_the_memory() -> None:
    objective = build(memory_length=18)
    run(objective, rows(0))
    before = {name: tensor.clone() for name, tensor in objective.carry_state().items()}
    tokens = heldout_rows(SPLIT, SPECIAL, DATA).batch(np.arange(4), np.arange(4))
    assert torch.equal(*(logits_of(o.eval(), tokens) for o in (objective, build(memory_length=18))))
    assert all(torch.equal(objective.carry_state()[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["permutation_lm", "mlm"])
def test_reversed_rows_are_read_backwards(name: str) -> None:
    """Turning a row of plain text round, and saying so, changes no prediction."""
    objective: Any = build() if name == "permutation_lm" else MaskedLanguageModel(MLMConfig(), settings(50, **LARGE_WEIGHTS))
    objective.initialize(0)
    ids = torch.randint(5, 50, (1, 16), generator=torch.Generator().manual_seed(0))
    target = torch.arange(16)[None] == 4
    logits = []
    for turned, is_reversed in ((False, False), (True, True), (True, False)):
        text, chosen = (ids.flip(1), target.flip(1)) if turned else (ids, target)
        tokens = replace(make_batch(text.tolist()), is_reversed=torch.tensor([is_reversed]))
        masked_ids = text.masked_fill(chosen, SPECIAL.mask) if name == "mlm" else text
        with torch.no_grad():
            output = objective.eval()(CorruptedBatch(tokens, masked_ids, chosen, 1, 16), randomness(tokens))
        logits.append(output.observations[f"{name}_logits"])
    torch.testing.assert_close(logits[1], logits[0])
    assert not torch.allclose(logits[2], logits[0], atol=1e-3)


def test_next_sentence_prediction() -> None:
    objective, tokens = build(next_sentence_weight=1.0), rows(0)
    batch, output = objective.corrupt(tokens, randomness(tokens)), run(objective, tokens)
    assert objective.counts(batch) == {name: term.count for name, term in output.terms.items()}
    assert output.terms["next_sentence"].count == 4
    loss = torch.stack([term.weight * term.total / term.count for term in output.terms.values()]).sum()
    loss.backward()
    assert [name for name, p in objective.named_parameters() if p.grad is None or not p.grad.any()] == []
    evaluator = objective.evaluator()
    evaluator.update(output, batch)
    figures, continues = evaluator.compute(), tokens.continues
    assert continues is not None
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert figures["next_sentence_share"] == continues.double().mean().item()
    right = (output.observations["next_sentence_logits"] > 0) == continues
    assert figures["next_sentence_accuracy"] == right.double().mean().item()
    fresh = build(next_sentence_weight=1.0, model={"initializer_range": 0.02})
    start = sum(term.total.item() / term.count for term in run(fresh, tokens).terms.values())
    assert start == pytest.approx(math.log(50) + math.log(2), rel=0.03)


@pytest.mark.parametrize(
    ("preset", "options", "says"),
    [
        ("xlnet-cpu", "objective.permutation_size=37", r"permutation_size 37 does not divide.*\[1, 2, 4, 8, 16, 32\]"),
        ("xlnet-cpu", "data.packing=packed", r"set data\.packing=two-part, or objective\.memory_length=0"),
        ("xlnet-cpu", "train.sequences_per_step=7", r"equally many forward and backward slots"),
        ("xlnet-cpu", "objective.mask_probability=0.2", r"did you mean 'objective\.prediction_ratio'"),
        ("xlnet-cpu", "model.encoder=bert", r"needs an encoder with a query stream.*set model\.encoder=xlnet"),
        ("xlnet-cpu", "objective.legacy_spans=true objective.span_targets=false", r"set one of them only"),
        (
            "xlnet-cpu",
            "data.packing=packed objective.memory_length=0 objective.next_sentence_weight=1",
            r"set data\.packing=two-part",
        ),
        ("cpu-small", "data.packing=two-part data.reversed_rows=false", r"have 3 segments.*set model\.num_token_types=3"),
        ("cpu-small", "data.packing=two-part model.num_token_types=3", r"run backwards, .*set data\.reversed_rows=false"),
        ("cpu-small", "data.sequence_length=256", r"sequence_length is 256, beyond model\.max_positions"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(preset: str, options: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pretrain_config(None, preset, options.split())
    assert re.search(says, str(caught.value))
