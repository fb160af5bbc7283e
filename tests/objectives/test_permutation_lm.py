"""Permutation language modeling: what a prediction depends on, what is remembered, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from discern.corruption.permutation import factorization_order
from discern.corruption.randomness import Randomness
from discern.data.batching.rows import RowStream, heldout_rows, training_rows
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.objectives.masked import MaskedLanguageModel, MLMConfig
from discern.objectives.permutation_lm import PermutationLanguageModel, PermutationLMConfig
from discern.training.pretrain_config import load_pretrain_config
from discern.types import CorruptedBatch, StepOutput, TokenBatch
from tests.support import MODELS, SPECIAL, MemorySplit, make_batch, random_documents, settings

LENGTH = 24
SPLIT = MemorySplit(random_documents(80, 50, seed=2), begins=lambda token: token % 3 != 0)
DATA = DataConfig(sequence_length=LENGTH, packing="two-part")


def build(seed: int = 0, model: dict[str, Any] | None = None, **options: Any) -> PermutationLanguageModel:
    """A network whose weights are large, so that what may be seen shows in what is predicted."""
    sizes = MODELS["permutation-lm"] | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.3} | (model or {})
    objective = PermutationLanguageModel(PermutationLMConfig(**options), settings(50, **sizes))
    objective.initialize(seed)
    return objective


def rows(slots: int | None = 4) -> RowStream:
    return training_rows(SPLIT, SPECIAL, DATA, 0, slots=slots)


def batch_of(stream: RowStream, step: int, count: int = 4) -> TokenBatch:
    return stream.batch(step * count + np.arange(count), np.arange(count))


def randomness(tokens: TokenBatch, step: int = 0) -> Randomness:
    return Randomness(0, step, tokens.slot)


def run(objective: PermutationLanguageModel, tokens: TokenBatch, step: int = 0) -> StepOutput:
    numbers = randomness(tokens, step)
    output: StepOutput = objective(objective.corrupt(tokens, numbers), numbers)
    return output


def predictions(objective: PermutationLanguageModel, batch: CorruptedBatch, numbers: Randomness) -> dict[tuple[int, int], Tensor]:
    """The logits of each target by (row, position)."""
    with torch.no_grad():
        logits = objective(batch, numbers).observations["permutation_lm_logits"]
    places = [(int(row), int(position)) for row, position in batch.masked_positions.nonzero().tolist()]
    return dict(zip(places, logits, strict=True))


def with_token(batch: CorruptedBatch, row: int, position: int) -> CorruptedBatch:
    """The batch with another token at one position."""
    ids = batch.tokens.input_ids.clone()
    ids[row, position] = 5 + (ids[row, position] - 4) % 45
    return replace(batch, tokens=replace(batch.tokens, input_ids=ids), masked_ids=ids)


def moved(first: Tensor, second: Tensor) -> bool:
    return not torch.equal(first, second)


@pytest.mark.parametrize("permutation_size", [None, 6])
def test_a_prediction_depends_on_earlier_targets_and_neither_on_itself_nor_on_later_ones(permutation_size: int | None) -> None:
    objective = build(permutation_size=permutation_size).eval()
    tokens = batch_of(rows(), 0)
    numbers = randomness(tokens)
    batch = objective.corrupt(tokens, numbers)
    before = predictions(objective, batch, numbers)
    order = factorization_order(LENGTH, LENGTH // 2, permutation_size, numbers)
    seen = unseen = 0
    for row, changed in before:
        after = predictions(objective, with_token(batch, row, changed), numbers)
        for place in before:
            if place[0] != row:
                assert not moved(before[place], after[place]), "rows are apart"
                continue
            own_part, changed_part = place[1] >= LENGTH // 2, changed >= LENGTH // 2
            earlier = changed_part < own_part or (own_part == changed_part and bool(order[row, changed] < order[row, place[1]]))
            assert moved(before[place], after[place]) == earlier, (place, changed)
            seen, unseen = seen + earlier, unseen + (not earlier)
    assert seen > 5
    assert unseen > 5


def test_every_context_token_of_its_own_and_the_first_part_is_seen() -> None:
    objective = build().eval()
    tokens = batch_of(rows(), 0)
    numbers = randomness(tokens)
    batch = objective.corrupt(tokens, numbers)
    before = predictions(objective, batch, numbers)
    context = ~batch.masked_positions & ~tokens.special_tokens_mask
    for position in context[0].nonzero().flatten().tolist():
        after = predictions(objective, with_token(batch, 0, position), numbers)
        for place in before:
            expected = place[0] == 0 and (position < LENGTH // 2 or place[1] >= LENGTH // 2)
            assert moved(before[place], after[place]) == expected


def test_documents_of_a_packed_row_see_nothing_of_each_other() -> None:
    objective = build(span_targets=False).eval()
    rows = training_rows(SPLIT, SPECIAL, DataConfig(sequence_length=64, packing="packed"), 0)
    tokens = batch_of(rows, 0)
    assert tokens.document_ids is not None
    numbers = randomness(tokens)
    batch = objective.corrupt(tokens, numbers)
    before = predictions(objective, batch, numbers)
    crossed = 0
    for row, position in (~tokens.special_tokens_mask).nonzero()[::7].tolist():
        after = predictions(objective, with_token(batch, row, position), numbers)
        changed = {place for place in before if moved(before[place], after[place])}
        same = {(row, to) for to in (tokens.document_ids[row] == tokens.document_ids[row, position]).nonzero().flatten().tolist()}
        assert changed <= same
        crossed += len({place for place in before if place[0] == row} - same)
    assert crossed > 20, "rows of one document would prove nothing"


def test_the_first_part_and_the_memory_know_nothing_of_the_second() -> None:
    objective, other = build(memory_length=18), build(memory_length=18)
    tokens = batch_of(rows(), 0)
    numbers = randomness(tokens)
    batch = objective.corrupt(tokens, numbers)
    ids = tokens.input_ids.clone()
    part = LENGTH // 2
    ids[:, part:] = torch.where(tokens.special_tokens_mask[:, part:], ids[:, part:], 5 + (ids[:, part:] + 7) % 45)
    changed = replace(batch, tokens=replace(tokens, input_ids=ids), masked_ids=ids)
    first, second = predictions(objective, batch, numbers), predictions(other, changed, numbers)
    assert all(moved(first[place], second[place]) == (place[1] >= part) for place in first)
    kept, also = objective.carry_state(), other.carry_state()
    assert all(torch.equal(kept[name], also[name]) for name in kept)


def test_a_target_that_sees_nothing_leaks_nothing() -> None:
    # One token between the special ones: it is the target, it may see nobody, and there is no memory.
    objective = build().eval()
    one, another = make_batch([[SPECIAL.cls, 9, SPECIAL.sep]]), make_batch([[SPECIAL.cls, 31, SPECIAL.sep]])
    assert any(
        not objective.visible(objective.corrupt(one, randomness(one, step)), randomness(one, step))[0, 1].any()
        for step in range(20)
    )
    for step in range(20):
        first, second = (run(objective, tokens, step).observations["permutation_lm_logits"] for tokens in (one, another))
        assert torch.equal(first, second)


def test_the_label_is_the_token_at_the_target() -> None:
    objective = build()
    tokens = batch_of(rows(), 0)
    batch = objective.corrupt(tokens, randomness(tokens))
    assert torch.equal(batch.masked_ids, tokens.input_ids), "the text is not changed"
    targets = run(objective, tokens).observations["permutation_lm_targets"]
    assert torch.equal(targets, tokens.input_ids[batch.masked_positions])
    assert batch.num_masked == 4 * (LENGTH // 6)


def test_targets_are_drawn_anew_at_every_pass() -> None:
    objective = build()
    tokens = batch_of(rows(), 0)
    first, second = (objective.corrupt(tokens, randomness(tokens, step)).masked_positions for step in (0, 1))
    assert not torch.equal(first, second)


def test_a_memory_is_that_of_its_own_slot_only() -> None:
    objective, other = build(memory_length=18), build(memory_length=18)
    stream = rows()
    for step in range(2):
        run(objective, batch_of(stream, step), step)
        tokens = batch_of(stream, step)
        ids = tokens.input_ids.clone()
        ids[2] = ids[2].flip(0)
        run(other, replace(tokens, input_ids=ids), step)
    for slot in range(4):
        name = f"memory.slot{slot}"
        assert moved(objective.carry_state()[name], other.carry_state()[name]) == (slot == 2)
    tokens = batch_of(stream, 2)
    first, second = (predictions(o, o.corrupt(tokens, randomness(tokens, 2)), randomness(tokens, 2)) for o in (objective, other))
    assert {row for row, position in first if moved(first[row, position], second[row, position])} == {2}


def test_a_memory_holds_the_newest_first_parts() -> None:
    """The lowest layer remembers its input, which without dropout is the embeddings of the text that was read."""
    objective = build(memory_length=18)
    stream = rows()
    for step in range(3):
        run(objective, batch_of(stream, step), step)
    part = LENGTH // 2
    for slot in range(4):
        read = torch.cat([batch_of(stream, step).input_ids[slot, :part] for step in range(3)])[-18:]
        remembered = objective.carry_state()[f"memory.slot{slot}"][0]
        torch.testing.assert_close(remembered, objective.encoder.embeddings.words(read[None])[0])


def test_a_memory_begins_with_zeros_that_are_attended_to() -> None:
    without, with_zeros = build(memory_length=0), build(memory_length=18)
    tokens = batch_of(rows(), 0)
    assert moved(*(run(o, tokens).observations["permutation_lm_logits"] for o in (without, with_zeros)))


def test_micro_batches_remember_what_the_whole_does() -> None:
    whole, parts = build(memory_length=18), build(memory_length=18)
    stream = rows()
    for step in range(3):
        tokens = batch_of(stream, step)
        total = run(whole, tokens, step).terms["permutation_lm"].total
        pieces = [run(parts, tokens.rows(start, start + 2), step).terms["permutation_lm"].total for start in (2, 0)]
        torch.testing.assert_close(torch.stack(pieces).sum(), total)
    for name, state in whole.carry_state().items():
        torch.testing.assert_close(parts.carry_state()[name], state)


def test_what_is_carried_comes_back() -> None:
    objective, other = build(memory_length=18), build(memory_length=18)
    stream = rows()
    for step in range(2):
        run(objective, batch_of(stream, step), step)
    state = {name: tensor.clone() for name, tensor in objective.carry_state().items()}
    other.load_carry_state(state)
    assert other.carry_state().keys() == state.keys() == {f"memory.slot{slot}" for slot in range(4)}
    outputs = [run(o, batch_of(stream, 2), 2) for o in (objective, other)]
    assert torch.equal(*(output.observations["permutation_lm_logits"] for output in outputs))
    # A rank that has two of the slots carries those two on.
    other.load_carry_state(state)
    run(other, batch_of(stream, 2).rows(0, 2), 2)
    assert sorted(other.carry_state()) == ["memory.slot0", "memory.slot1"]
    run(other, batch_of(stream, 3).rows(0, 2), 3)
    assert other._memory._loaded == {}, "what it was given is let go once it has its own"
    with pytest.raises(ValueError, match="not the memory of a slot"):
        build(memory_length=12).load_carry_state(state)


def test_evaluation_neither_reads_nor_changes_the_memory() -> None:
    objective = build(memory_length=18)
    run(objective, batch_of(rows(), 0))
    before = {name: tensor.clone() for name, tensor in objective.carry_state().items()}
    tokens = batch_of(heldout_rows(SPLIT, SPECIAL, DATA), 0)
    objective.eval()
    fresh = build(memory_length=18).eval()
    assert torch.equal(*(run(o, tokens).observations["permutation_lm_logits"] for o in (objective, fresh)))
    assert all(torch.equal(objective.carry_state()[name], before[name]) for name in before)


def test_reversed_rows_are_read_backwards() -> None:
    """Where all that a row has is plain text, turning it round and saying so changes no prediction."""
    objective = build().eval()
    ids = torch.randint(5, 50, (1, 16), generator=torch.Generator().manual_seed(0))
    forward = make_batch(ids.tolist())
    forward = replace(forward, is_reversed=torch.tensor([False]))
    backward = replace(make_batch(ids.flip(1).tolist()), is_reversed=torch.tensor([True]))
    targets = torch.zeros(1, 16, dtype=torch.bool)
    targets[0, [4, 9]] = True
    found = []
    for tokens, chosen in ((forward, targets), (backward, targets.flip(1))):
        batch = CorruptedBatch(tokens, tokens.input_ids, chosen, 2, 16)
        found.append(predictions(objective, batch, randomness(tokens)))
    # Targets that see each other in an order of their own: only the one that sees neither must be the same.
    pairs = [(found[0][0, place], found[1][0, 15 - place]) for place in (4, 9)]
    assert any(torch.allclose(first, second, atol=1e-5) for first, second in pairs)
    plain = replace(backward, is_reversed=torch.tensor([False]))
    unsaid = predictions(objective, CorruptedBatch(plain, plain.input_ids, targets.flip(1), 2, 16), randomness(plain))
    assert not any(torch.allclose(found[0][0, place], unsaid[0, 15 - place], atol=1e-5) for place in (4, 9))


def test_next_sentence_prediction() -> None:
    objective = build(next_sentence_weight=1.0)
    tokens = batch_of(rows(), 0)
    output = run(objective, tokens)
    assert output.terms["next_sentence"].count == 4
    assert objective.counts(objective.corrupt(tokens, randomness(tokens))) == {k: t.count for k, t in output.terms.items()}
    loss = sum(term.weight * term.total / term.count for term in output.terms.values())
    assert isinstance(loss, Tensor)
    loss.backward()
    assert [name for name, p in objective.named_parameters() if p.grad is None or not p.grad.any()] == []
    evaluator = objective.evaluator()
    with torch.no_grad():
        evaluator.update(run(objective, tokens), objective.corrupt(tokens, randomness(tokens)))
    figures = evaluator.compute()
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    logits = output.observations["next_sentence_logits"]
    assert tokens.continues is not None
    assert figures["next_sentence_share"] == tokens.continues.double().mean().item()
    assert figures["next_sentence_accuracy"] == ((logits > 0) == tokens.continues).double().mean().item()
    fresh = build(next_sentence_weight=1.0, model={"initializer_range": 0.02})
    start = sum(term.total.item() / term.count for term in run(fresh, tokens).terms.values())
    assert start == pytest.approx(fresh.initial_loss(), rel=0.03)
    with pytest.raises(ConfigError, match="do not record whether"):
        run(objective, make_batch([[SPECIAL.cls, 9, 8, SPECIAL.sep]]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("objective.permutation_size=37", r"permutation_size 37 does not divide.*\[1, 2, 4, 8, 16, 32\]"),
        ("data.reuse_length=20", r"reuse_length 20 is not half.*set data\.reuse_length=32"),
        ("data.packing=packed", r"memory needs rows that continue.*set data\.packing=two-part, or objective\.memory_length=0"),
        ("data.packing=segments", r"memory needs rows that continue"),
        ("train.sequences_per_step=7", r"sequences_per_step 7 .*set train\.sequences_per_step=8"),
        ("train.micro_batch_size=5", r"slots of train\.sequences_per_step are not a multiple of train\.micro_batch_size 5"),
        ("objective.mask_probability=0.2", r"unknown key 'mask_probability'(.|\n)*did you mean 'objective\.prediction_ratio'"),
        ("objective.name=mlm objective.prediction_ratio=5", r"did you mean 'objective\.mask_probability'"),
        ("model.encoder=bert", r"needs an encoder with a query stream.*set model\.encoder=xlnet"),
        ("objective.legacy_spans=true objective.span_targets=false", r"set one of them only"),
        ("data.packing=packed objective.memory_length=0 objective.next_sentence_weight=1", r"set data\.packing=two-part"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(options: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pretrain_config(None, "xlnet-cpu", options.split())
    assert re.search(says, str(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        "objective.memory_length=0",
        "objective.span_targets=false",
        "objective.legacy_spans=true",
        "data.reversed_rows=false",
        "data.reversed_rows=false train.sequences_per_step=7",
        "objective.next_sentence_weight=1",
        "objective.memory_length=0 data.packing=packed objective.permutation_size=none",
        "objective.name=mlm",
        "objective.permutation_size=8",
    ],
)
def test_the_ablations_of_the_paper_are_settings(options: str) -> None:
    config = load_pretrain_config(None, "xlnet-cpu", options.split()).config
    assert config.model.encoder == "xlnet"
    assert config.objective.reads_in_order == ("memory_length=0" not in options and "mlm" not in options)


@pytest.mark.parametrize("packing", ["two-part", "segments"])
def test_masked_language_modeling_runs_on_the_same_encoder_and_rows(packing: str) -> None:
    data = DataConfig(sequence_length=LENGTH, packing=packing)  # type: ignore[arg-type]
    stream = training_rows(SPLIT, SPECIAL, data, 0)
    control = MaskedLanguageModel(MLMConfig(), settings(50, **MODELS["permutation-lm"]))
    control.initialize(0)
    tokens = stream.batch(np.arange(8), np.arange(8))
    numbers = Randomness(0, 0, tokens.slot)
    (term,) = control(control.corrupt(tokens, numbers), numbers).terms.values()
    assert term.total.item() / term.count == pytest.approx(control.initial_loss(), rel=0.03)
    term.total.backward()
    assert [name for name, parameter in control.named_parameters() if parameter.grad is None] == []


def test_two_parts_want_three_segments_of_an_encoder_with_a_table() -> None:
    forwards = ["data.packing=two-part", "data.reversed_rows=false"]
    with pytest.raises(ConfigError, match=r"have 3 segments.*set model\.num_token_types=3"):
        load_pretrain_config(None, "cpu-small", forwards)
    load_pretrain_config(None, "cpu-small", [*forwards, "model.num_token_types=3"])


def test_rows_that_run_backwards_want_an_encoder_that_can_be_told() -> None:
    with pytest.raises(
        ConfigError, match=r"run backwards, which model\.encoder 'bert' does not support.*set data\.reversed_rows=false"
    ):
        load_pretrain_config(None, "cpu-small", ["data.packing=two-part", "model.num_token_types=3"])
    load_pretrain_config(None, "xlnet-cpu", ["objective.name=mlm"])


def test_a_masked_language_model_is_told_which_rows_run_backwards() -> None:
    """Text turned round, and said to be, is the same text."""
    sizes = MODELS["permutation-lm"] | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.3}
    model = MaskedLanguageModel(MLMConfig(), settings(50, **sizes))
    model.initialize(0)
    ids = torch.randint(5, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    ids[1] = ids[0].flip(0)
    chosen = torch.zeros(2, 16, dtype=torch.bool)
    chosen[0, 4] = chosen[1, 11] = True
    tokens = make_batch(ids.tolist())
    found = []
    for is_reversed in ([False, True], [False, False]):
        batch = CorruptedBatch(
            replace(tokens, is_reversed=torch.tensor(is_reversed)), ids.masked_fill(chosen, SPECIAL.mask), chosen, 2, 32
        )
        with torch.no_grad():
            found.append(model.eval()(batch, randomness(tokens)).observations["mlm_logits"])
    told, untold = found
    torch.testing.assert_close(told[0], told[1])
    assert not torch.allclose(untold[0], untold[1], atol=1e-3)


def test_an_encoder_of_one_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set model\.encoder=xlnet"):
        PermutationLanguageModel(PermutationLMConfig(), settings())


def test_rows_may_be_of_any_length_where_there_is_no_table_of_positions() -> None:
    config = load_pretrain_config(None, "xlnet-cpu", ["data.sequence_length=256", "objective.permutation_size=none"]).config
    assert config.data.sequence_length > config.model.max_positions
    with pytest.raises(ConfigError, match=r"sequence_length is 256, beyond model\.max_positions"):
        load_pretrain_config(None, "cpu-small", ["data.sequence_length=256"])
