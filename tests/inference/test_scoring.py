"""Scores of texts, by tiny networks and by the command."""

from __future__ import annotations

import gzip
import io
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from discern.errors import ConfigError, DataError, NumericsError
from discern.inference import PREFERRED, score_file, scorers
from discern.inference.rows import batches
from discern.inference.score_file import score_lines
from discern.inference.scoring import Score, ScoringModel, TokenScorer, load_scorer
from discern.model_files.export import export
from discern.model_files.huggingface import SETTINGS_NAME
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.storage.checksums import remove_recorded, write_recorded
from tests.inference.small_scorers import SPECIAL, TEXTS, ids_of, make_objective, make_scorer
from tests.small.run import make_run

EVERY = [
    ("electric", "electric"),
    ("electric", "two-tower"),
    ("rtd", "rtd"),
    ("rtd", "pll"),
    ("rtd", "pll-word-l2r"),
    ("rtd", "inversion"),
    ("mlm", "pll"),
    ("permutation-lm", "permutation-lm"),
]
LONG = "the chef cooked the meal and the guests ate purple elephants, " * 3


def objective_of(name: str) -> Objective:
    return make_objective(name, encoder="xlnet" if name == "permutation-lm" else "bert")


def test_every_registered_scorer_is_tried_here() -> None:
    assert {name for _, name in EVERY} == set(scorers.names())
    assert set(PREFERRED) <= set(scorers.names())


@pytest.mark.parametrize(("objective", "name"), EVERY)
def test_scores_do_not_depend_on_their_company(objective: str, name: str) -> None:
    scorer = make_scorer(objective_of(objective), name, max_length=20, chosen_share=0.15)
    texts = [*TEXTS, LONG, ""]
    together, reversed_ = scorer.score(texts), scorer.score(texts[::-1])[::-1]
    assert [score.text for score in together] == texts
    assert [score.tokens for score in together] == [score.tokens for score in reversed_]
    for text, score, other in zip(texts, together, reversed_, strict=True):
        (alone,) = scorer.score([text])
        assert score.token_scores == pytest.approx(alone.token_scores, abs=1e-5)
        assert score.token_scores == pytest.approx(other.token_scores, abs=1e-5)
        assert score.total == math.fsum(score.token_scores)


@pytest.mark.parametrize(("objective", "name"), EVERY)
def test_texts_of_the_same_tokens_have_the_very_same_score(objective: str, name: str) -> None:
    scorer = make_scorer(objective_of(objective), name, chosen_share=0.15)
    first, *_, last = scorer.score(["The chef ate.", *TEXTS, LONG, "the CHEF  ate."])
    assert first.total == last.total
    assert first.offsets != last.offsets


def test_a_text_without_a_token_scores_nothing() -> None:
    scorer = make_scorer(make_objective("electric"), "electric")
    assert scorer.score([]) == []
    for score in scorer.score(["", "  "]):
        assert (score.total, score.tokens, score.token_scores, score.windows) == (0.0, [], [], 0)


def test_each_token_of_a_long_text_counts_where_it_has_most_context() -> None:
    objective, room = make_objective("electric"), 10
    scorer = make_scorer(objective, "electric", max_length=room + 2)
    ids = ids_of(LONG)[: room + 1]
    text = scorer.tokenizer.decode(ids)
    assert ids_of(text) == ids
    (score,) = scorer.score([text])
    assert score.windows == 2
    network = objective.networks()["discriminator"]

    def read(part: list[int]) -> list[float]:
        return list((-network.token_logits(torch.tensor([[SPECIAL.cls, *part, SPECIAL.sep]])))[0, 1:-1].tolist())

    left, right = read(ids[:room]), read(ids[1:])
    # To the right of token 5 the first window has 4 tokens, to its left the second has 4: the first is taken.
    assert score.token_scores == pytest.approx(left[:6] + right[5:], abs=1e-5)
    assert scorer.score([scorer.tokenizer.decode(ids[:room])])[0].windows == 1


def test_a_score_that_is_not_finite_is_an_error() -> None:
    objective = make_objective("electric")
    objective.networks()["discriminator"].head.output.bias.fill_(math.nan)
    with pytest.raises(NumericsError, match=r"text 1 has a score that is not finite.*\n.*discern doctor"):
        make_scorer(objective, "electric").score(["a meal"])


def test_what_a_model_lacks_is_said() -> None:
    networks = make_objective("mlm").networks()
    missing = {name: scorers.load(name).lacks(ScoringModel(networks, SPECIAL)) for name in scorers.names()}
    assert {name for name, lack in missing.items() if lack is None} == {"pll", "pll-word-l2r"}
    assert missing["electric"] == "an energy model, as objective 'electric' trains"


def test_an_unknown_scorer_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'electric'"):
        scorers.load("electrc")
    assert all(issubclass(scorers.load(name), TokenScorer) for name in scorers.names())


@pytest.mark.parametrize("lengths", [[], [3], [500] * 20, list(range(3, 600, 7)), [3] * 1000, [9000, 3]])
def test_batches_hold_each_row_once_and_stay_small(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(number for batch in found for number in batch) == list(range(len(lengths)))
    for batch in found:
        widest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or (len(batch) * widest <= 4096 and len(batch) <= 256)


SENTENCES = ["The chef cooked the meal.", "cats", "purple elephants, and naïve guests"]
NAMES = ("rtd", "electric", "mlm", "replace-mlm", "all-tokens-mlm", "rtd-masked-only")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each objective, and exports of some."""
    folder = tmp_path_factory.mktemp("score")
    for name in NAMES:
        make_run(folder / name, overrides=[f"objective.name={name}", "data.sequence_length=16"])
    for name, out, network, every in [
        ("rtd", "rtd-both", None, True),
        ("rtd", "rtd-generator", "generator", False),
        ("electric", "electric-alone", None, False),
        ("mlm", "mlm-export", None, False),
        ("replace-mlm", "replace-mlm-alone", None, False),
    ]:
        export(folder / name, out=folder / out, network=network, all_networks=every, progress=Silent(), warn=pytest.fail)
    return folder


def totals(folder: Path, name: str | None = None) -> list[float]:
    return [score.total for score in load_scorer(folder, name, "cpu", warn=pytest.fail).score(SENTENCES)]


@pytest.mark.parametrize(
    ("folder", "scorer"),
    [
        ("rtd", "rtd"),
        ("rtd-masked-only", "rtd"),
        ("electric", "electric"),
        ("mlm", "pll"),
        ("replace-mlm", "pll"),
        ("all-tokens-mlm", "pll"),
        ("rtd-both", "rtd"),
        ("rtd-generator", "pll"),
        ("electric-alone", "electric"),
        ("mlm-export", "pll"),
    ],
)
def test_the_model_chooses_the_scorer(runs: Path, folder: str, scorer: str) -> None:
    assert load_scorer(runs / folder, warn=pytest.fail).name == scorer


@pytest.mark.parametrize(
    ("export_", "run", "scorer"),
    [
        ("rtd-both", "rtd", "rtd"),
        ("rtd-both", "rtd", "inversion"),
        ("rtd-both", "rtd", "pll"),
        ("rtd-generator", "rtd", "pll-word-l2r"),
        ("electric-alone", "electric", "electric"),
        ("mlm-export", "mlm", "pll"),
    ],
)
def test_an_export_scores_as_the_run_does(runs: Path, export_: str, run: str, scorer: str) -> None:
    assert totals(runs / export_, scorer) == pytest.approx(totals(runs / run, scorer), abs=1e-4)


def test_the_generator_and_not_the_encoder_reads_masks_where_the_encoder_never_saw_one(runs: Path) -> None:
    scorer = load_scorer(runs / "replace-mlm", "pll", "cpu", warn=pytest.fail)
    objective = make_run(runs / "again", overrides=["objective.name=replace-mlm", "data.sequence_length=16"])
    generator = objective.networks()["generator"]
    ids = scorer.tokenizer.encode("the", add_special_tokens=False).ids
    with torch.no_grad():
        logits = generator.head(generator.encoder(torch.tensor([[2, 4, 3]])))[0, 1]
    assert scorer.score(["the"])[0].total == pytest.approx(float(logits.log_softmax(0)[ids[0]]), abs=1e-4)
    with pytest.raises(ConfigError, match="no scorer can use it; it has no network for scoring"):
        load_scorer(runs / "replace-mlm-alone", warn=pytest.fail)


def test_a_huggingface_folder_without_our_settings_is_scored(runs: Path, tmp_path: Path) -> None:
    from transformers import ElectraConfig, ElectraForPreTraining

    torch.manual_seed(0)
    sizes = {"vocab_size": 220, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ElectraForPreTraining(ElectraConfig(**sizes, intermediate_size=32, max_position_embeddings=40)).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((runs / "rtd" / "tokenizer.json").read_bytes())
    scorer = load_scorer(tmp_path, device="cpu", warn=pytest.fail)
    assert (scorer.name, scorer.step, scorer.max_length) == ("rtd", None, 40)
    ids = scorer.tokenizer.encode(SENTENCES[0]).ids
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, 1:-1]
    assert scorer.score(SENTENCES)[0].token_scores == pytest.approx((-theirs).tolist(), abs=1e-5)


def test_an_xlnet_is_scored_from_left_to_right(tmp_path: Path) -> None:
    settings = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32", "data.packing=two-part"]
    make_run(tmp_path / "run", overrides=[*settings, "model.hidden_size=32", "data.sequence_length=16"])
    export(tmp_path / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    assert load_scorer(tmp_path / "export", warn=pytest.fail).name == "permutation-lm"
    assert totals(tmp_path / "export") == pytest.approx(totals(tmp_path / "run"), abs=1e-4)
    remove_recorded([tmp_path / "export" / SETTINGS_NAME])
    assert totals(tmp_path / "export") == pytest.approx(totals(tmp_path / "run"), abs=1e-4)


def test_of_a_network_with_a_query_stream_it_is_said_what_it_was_trained_by(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm", "model.encoder=xlnet", "model.embedding_size=32"])
    with pytest.raises(ConfigError, match=r"needs a network with a query stream.* trained by 'mlm'\n.*--scorer pll"):
        load_scorer(tmp_path / "run", "permutation-lm", warn=pytest.fail)


def test_the_share_of_chosen_tokens_is_assumed_aloud(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "rtd-both", tmp_path / "copy")
    remove_recorded([tmp_path / "copy" / SETTINGS_NAME])
    told: list[str] = []
    load_scorer(tmp_path / "copy", "inversion", "cpu", warn=told.append).score(SENTENCES)
    # 0.15 with replacement: of 510 words 77 draws, of which 71.5 differ.
    assert ["0.14, that of the released ELECTRAs of this width, is assumed" in message for message in told] == [True]
    totals(tmp_path / "copy", "rtd")


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 2 / 14),  # 0.15 of 14 words is 2.1
        (["objective.mask_probability=0.5"], 7 / 14),
        (["objective.mask_probability=0.5", "objective.sentence_contrastive_weight=1.0"], 0.8 * 7 / 14),
        (["objective.masking=with-replacement"], 1 - (13 / 14) ** 2),
    ],
)
def test_the_inversion_knows_which_share_was_chosen(tmp_path: Path, overrides: list[str], share: float) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=rtd", "data.sequence_length=16", *overrides])
    load = partial(load_scorer, tmp_path / "run", device="cpu", warn=pytest.fail)
    odds, likelihoods = load("rtd").score(SENTENCES), load("pll").score(SENTENCES)
    for score, odd, likelihood in zip(load("inversion").score(SENTENCES), odds, likelihoods, strict=True):
        for found, log_odds, log_q in zip(score.token_scores, odd.token_scores, likelihood.token_scores, strict=True):
            d, q = 1 / (1 + math.exp(-log_odds)), math.exp(log_q)
            assert math.exp(found) == pytest.approx(share * d * q / (share * q + (1 - share) * (1 - d)), rel=1e-4)


def test_without_one_share_for_all_words_there_is_no_inversion(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=rtd", "objective.masking=rarity", "data.sequence_length=16"])
    with pytest.raises(ConfigError, match=r"'inversion' needs uniformly chosen positions: with masking 'rarity'"):
        load_scorer(tmp_path / "run", "inversion", "cpu", warn=pytest.fail)


@pytest.mark.parametrize(
    ("folder", "scorer", "message", "hint"),
    [
        ("electric", "pll", "it has an energy model and a two-tower generator", "--scorer electric or two-tower"),
        ("rtd", "electric", "scorer 'electric' needs an energy model", "--scorer inversion or pll or pll-word-l2r or rtd"),
        ("rtd-masked-only", "inversion", "trained on every token", "--scorer pll or pll-word-l2r or rtd"),
        ("mlm", "inversion", "a discriminator and a generator", "--scorer pll or pll-word-l2r"),
        ("mlm", "ppl", "unknown scorer 'ppl'", "did you mean 'pll'"),
    ],
)
def test_a_scorer_that_the_model_cannot_serve_is_refused(runs: Path, folder: str, scorer: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(runs / folder, scorer, warn=pytest.fail)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def lines_of(runs: Path, source: Path, warnings: list[str]) -> list[Score]:
    scorer = load_scorer(runs / "electric", device="cpu", warn=pytest.fail)
    return [score for scores in score_lines(scorer, source, Silent(), warnings.append) for score in scores]


def test_a_file_is_scored_line_by_line_in_order(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "_BLOCK", 2)
    content = "".join(f"{text}\r\n" for text in SENTENCES).encode()
    (tmp_path / "plain.txt").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    expected = totals(runs / "electric")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for source in (tmp_path / "plain.txt", tmp_path / "packed.gz", Path("-")):
        found = lines_of(runs, source, [])
        assert [score.text for score in found] == SENTENCES
        assert [score.total for score in found] == pytest.approx(expected, abs=1e-5)


def test_sentences_longer_than_the_model_are_told_of(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("the\n" + "the meal " * 20 + "\n" + "the " * 14 + "\n" + "the " * 15 + "\n")
    warnings: list[str] = []
    assert [score.windows > 1 for score in lines_of(runs, tmp_path / "a", warnings)] == [False, True, False, True]
    first, whole = warnings
    assert first.startswith(f"{tmp_path / 'a'}:2: ")
    assert "trained on 14 at a time: read in" in first
    assert whole == "2 of 4 texts were read in several windows"


@pytest.mark.parametrize(("line", "why"), [("", "is empty"), ("  \t", "is empty"), ("\u200b", "contains nothing that the")])
def test_an_empty_line_ends_the_scoring_after_what_stands_before_it(runs: Path, tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "a").write_text(f"the chef\ncats\n{line}\nthe meal\n")
    scorer = load_scorer(runs / "electric", device="cpu", warn=pytest.fail)
    blocks = score_lines(scorer, tmp_path / "a", Silent(), pytest.fail)
    found = next(blocks)
    with pytest.raises(DataError, match=rf"a:3 {why}"):
        next(blocks)
    assert [score.text for score in found] == ["the chef", "cats"]


def test_empty_lines_at_the_end_are_passed_over(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_file, "_BLOCK", 2)
    for end in ("\n", "\n \n\n"):
        (tmp_path / "a").write_text(f"the chef\ncats\n{end}")
        assert [score.text for score in lines_of(runs, tmp_path / "a", [])] == ["the chef", "cats"]
    (tmp_path / "a").write_text("\n\n")
    with pytest.raises(DataError, match="has no lines"):
        lines_of(runs, tmp_path / "a", [])


def test_a_file_without_a_line_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match="has no lines"):
        lines_of(runs, tmp_path / "a", [])
    with pytest.raises(DataError, match="nowhere"):
        lines_of(runs, tmp_path / "nowhere", [])


def test_text_that_the_vocabulary_cannot_write_is_said(runs: Path, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "a").write_text("the chef\n猫坐在垫子上\n")
    list(score_lines(load_scorer(runs / "mlm", warn=pytest.fail), tmp_path / "a", Silent(), told.append))
    assert [message.split(" of ")[0] for message in told] == ["6"]
    assert "unknown to the vocabulary" in told[0]


def test_a_fine_tuning_is_known_as_one(tmp_path: Path) -> None:
    write_recorded(tmp_path, {"finetuned.json": "{}"})
    with pytest.raises(DataError, match=r"is a fine-tuned model; it outputs task predictions.*\n.*discern predict"):
        load_scorer(tmp_path, warn=pytest.fail)
