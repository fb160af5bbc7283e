"""Thresholds by hand, on corrupted text, and beside a model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.cli.detect import detect as detect_command
from discern.corruption.masking import quota
from discern.data.batching.segments import ExampleStream, PackedRows
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.inference.calibration import TokenPredictions, calibrate, detect_corrupted
from discern.inference.detection import chosen_threshold, head_fingerprint, load_detection_model, load_detector
from discern.inference.proposals import Proposer
from discern.inference.threshold_curve import Rates, ThresholdCurve
from discern.model_files.export import export
from discern.model_files.hub import CALIBRATION_NAME
from discern.models.base import Network
from discern.models.electra.encoder import BertEncoder
from discern.models.embeddings import Embeddings
from discern.models.heads import ReplacedTokenHead
from discern.progress import Silent
from tests.inference.test_proposals import SIZES, V, network
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run
from tests.support import SPECIAL, MemorySplit, random_documents

# From the highest: wrong, wrong, right, wrong, right, right, wrong, right; two pairs of equal scores.
SCORES = [0.9, 0.8, 0.7, 0.7, 0.5, 0.4, 0.2, 0.2]
WRONG = [True, True, False, True, False, False, True, False]


def curve() -> ThresholdCurve:
    order = np.random.default_rng(0).permutation(len(SCORES))
    return ThresholdCurve(np.array(SCORES)[order], np.array(WRONG)[order])


@pytest.mark.parametrize(
    ("threshold", "marked", "hits"),
    [(1.0, 0, 0), (0.9, 1, 1), (0.85, 1, 1), (0.8, 2, 2), (0.7, 4, 3), (0.71, 2, 2), (0.5, 5, 3), (0.2, 8, 4), (0.0, 8, 4)],
)
def test_a_score_that_equals_the_threshold_is_marked(threshold: float, marked: int, hits: int) -> None:
    rates = curve().at(threshold)
    assert (rates.threshold, rates.marked, rates.hits) == (threshold, marked, hits)
    assert rates.precision == (hits / marked if marked else 0)
    assert rates.recall == hits / 4
    assert rates.f1 == pytest.approx(2 * hits / (marked + 4))


def test_the_lowest_threshold_of_a_precision_is_found_and_equal_scores_are_not_parted() -> None:
    # 0.9: 1/1, 0.8: 2/2, 0.7: 3/4, 0.5: 3/5, 0.4: 3/6, 0.2: 4/8.
    assert curve().reaching(1.0) == Rates(0.75, 1.0, 0.5, 2 / 3, 2, 2)
    assert curve().reaching(0.75) == Rates(0.6, 0.75, 0.75, 0.75, 4, 3)
    # Precision falls and rises: 3/6 and 4/8 are the same one half, and of these the higher recall counts.
    assert curve().reaching(0.5) == Rates(0.2, 0.5, 1.0, 2 / 3, 8, 4)


def test_thresholds_lie_midway_so_that_rounding_moves_nothing() -> None:
    found = curve().reaching(0.75)
    assert found is not None
    noise = np.random.default_rng(1).uniform(-1e-6, 1e-6, len(SCORES))
    assert ThresholdCurve(np.array(SCORES) + noise, WRONG).at(found.threshold).marked == found.marked


def test_what_cannot_be_reached_is_none_and_the_best_is_told() -> None:
    never = ThresholdCurve([0.9, 0.8, 0.7, 0.6], [False, True, True, False])
    # 0/1, 1/2, 2/3, 2/4.
    assert never.reaching(0.7) is None
    best = never.most_precise()
    assert best is not None
    assert (best.precision, best.recall, best.marked) == (pytest.approx(2 / 3), 1.0, 3)
    assert best.threshold == pytest.approx(0.65)


def test_a_handful_of_marks_is_no_evidence() -> None:
    assert curve().reaching(1.0, min_marked=3) is None
    best = curve().most_precise(min_marked=3)
    assert best is not None
    assert (best.marked, best.precision) == (4, 0.75)
    assert curve().most_precise(min_marked=9) is None


def test_best_f1() -> None:
    best = curve().best_f1()
    assert best is not None
    assert (best.marked, best.f1) == (4, 0.75)
    assert ThresholdCurve([0.1, 0.2], [False, False]).best_f1() is None


def test_nothing_and_one() -> None:
    empty = ThresholdCurve([], [])
    assert empty.at(0.5) == Rates(0.5, 0.0, 0.0, 0.0, 0, 0)
    assert empty.reaching(0.5) is None
    assert empty.most_precise() is None
    assert ThresholdCurve([0.3], [True]).reaching(1.0) == Rates(0.3, 1.0, 1.0, 1.0, 1, 1)


def test_neighboring_floats_stay_apart() -> None:
    low = 0.5
    high = math.nextafter(low, 1)
    assert ThresholdCurve([high, low], [True, False]).reaching(1.0) == Rates(high, 1.0, 1.0, 1.0, 1, 1)


def test_by_closed_form_on_two_uniform_distributions() -> None:
    """Wrong ones uniform on (0, 1), right ones on (0, 1/2), as many of each: from t >= 1/2 on precision is 1, and below it
    (1 - t) / ((1 - t) + (1 - 2t)), which is 0.8 at t = 3/7."""
    n = 20_000
    grid = (np.arange(n) + 0.5) / n
    found = ThresholdCurve(np.concatenate([grid, grid / 2]), np.arange(2 * n) < n).reaching(0.8)
    assert found is not None
    assert found.threshold == pytest.approx(3 / 7, abs=1e-3)
    assert found.recall == pytest.approx(4 / 7, abs=1e-3)


def test_the_interval_is_wilson_s() -> None:
    # 8 of 10: the textbook's 0.490 to 0.943.
    low, high = Rates(0.5, 0.8, 1.0, 0.0, 10, 8).precision_interval()
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert Rates(0.5, 0.0, 0.0, 0.0, 0, 0).precision_interval() == (0.0, 1.0)
    assert Rates(0.5, 1.0, 1.0, 1.0, 3, 3).precision_interval()[1] == 1.0


def discriminator() -> Network:
    made = Network(BertEncoder(Embeddings(V, 8, SIZES), SIZES), ReplacedTokenHead(SIZES))
    make_noisy(torch.nn.ModuleList([made.encoder, made.head]))
    made.encoder.eval(), made.head.eval()
    return made


def stream() -> ExampleStream:
    split = MemorySplit(random_documents(6, V, sentences=(2, 4), words=(3, 12)))
    return ExampleStream(PackedRows(split, SPECIAL, 16, 0, rotate=False), 0, shuffle=False)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
def test_every_token_that_is_not_special_is_judged_once(kind: str) -> None:
    rows = stream()
    answers = detect_corrupted(
        discriminator(), Proposer(network(kind), SPECIAL), rows, corruption=0.3, sequences=0, progress=Silent()
    )
    batch = rows.batch(np.arange(rows.num_rows), np.arange(rows.num_rows))
    assert len(answers.probability) == int(batch.maskable.sum())
    # Never more are replaced than were chosen; with 23 words, nearly all that were.
    chosen = int(quota(batch.maskable, 0.3).sum())
    assert 0.5 * chosen < answers.is_replaced.sum() <= chosen


@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_batches_and_other_rows_change_nothing(tokens: int) -> None:
    def answers(tokens_per_batch: int) -> TokenPredictions:
        return detect_corrupted(
            discriminator(),
            Proposer(network("masked"), SPECIAL),
            stream(),
            corruption=0.2,
            sequences=5,
            progress=Silent(),
            tokens_per_batch=tokens_per_batch,
        )

    assert answers(tokens).is_replaced.tolist() == answers(64).is_replaced.tolist()
    assert answers(tokens).probability == pytest.approx(answers(64).probability, abs=1e-6)


def test_the_fingerprint_tells_weights_apart() -> None:
    one, other = discriminator(), discriminator()
    assert head_fingerprint(one) == head_fingerprint(other)
    with torch.no_grad():
        other.head.output.bias += 1e-4
    assert head_fingerprint(one) != head_fingerprint(other)


SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "modern-cpu"
TEXT = """The river rises in the hills north of the town and flows south to the sea.
It was built in the early nineteenth century by the railway company.
He was elected to the council in 1921 and served for three years.
The film was released in the United States and received mixed reviews.
She studied law at the university before she moved to the capital.
The species is found in forests and is threatened by the loss of habitat.
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "a.txt").write_text("\n".join(f"{line}\n" for line in TEXT.splitlines() * 4))
    return prepared(folder / "a.txt", folder / "data", 0.9)


def prepared(text: Path, out: Path, heldout: float) -> Path:
    build = PrepareOptions(heldout=heldout, workers=1)
    prepare([str(text)], out=out, tokenizer=TokenizerChoice(path=SHIPPED), options=build, progress=Silent())
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED, tmp_path / "model")
    return tmp_path / "model"


def found(model: Path, data: Path, precision: float, **options: Any) -> dict[str, Any]:
    return calibrate(model, data, Silent(), pytest.fail, precision=precision, **options)


def test_the_threshold_has_the_precision_that_it_says(model: Path, data: Path) -> None:
    values = found(model, data, 0.5, corruption=0.3)
    assert values["reached"]
    assert values["precision"] == values["hits"] / values["marked"] >= 0.5
    assert values["recall"] == values["hits"] / values["replaced"]
    assert values["marked"] >= 20
    # Counted again, from the discriminator's answers.
    loaded = load_detection_model(model, pytest.fail)
    assert loaded.proposer is not None
    heldout = TokenData.open(data)
    rows = PackedRows(heldout.split("heldout"), heldout.special_tokens, loaded.detector.max_length, 0, rotate=False)
    judged = detect_corrupted(
        loaded.detector.network,
        loaded.proposer,
        ExampleStream(rows, 0, shuffle=False),
        corruption=0.3,
        sequences=0,
        progress=Silent(),
    )
    marked = judged.probability >= values["threshold"]
    assert int(marked.sum()) == values["marked"]
    assert int((marked & judged.is_replaced).sum()) == values["hits"]


def test_it_is_kept_beside_the_model_and_gone_by(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detector = load_detector(model, pytest.fail)
    assert chosen_threshold(model, detector, None, pytest.fail).origin == "default"
    values = found(model, data, 0.5, corruption=0.3)
    assert values["kept"] == model / CALIBRATION_NAME
    chosen = chosen_threshold(model, detector, None, pytest.fail)
    assert (chosen.value, chosen.origin, chosen.precision) == (values["threshold"], "calibrated", 0.5)
    assert chosen.described == "calibrated for precision 0.5"
    assert chosen_threshold(model, detector, 0.25, pytest.fail).value == 0.25
    detect_command(model, text=["She was elected banana."], json_output=True)
    assert json.loads(capsys.readouterr().out)["threshold"] == values["threshold"]


def test_twice_is_the_same(model: Path, data: Path) -> None:
    assert found(model, data, 0.5) == found(model, data, 0.5)


def test_other_weights_go_by_one_half(model: Path, data: Path) -> None:
    found(model, data, 0.5, corruption=0.3)
    detector = load_detector(model, pytest.fail)
    with torch.no_grad():
        detector.network.head.output.bias += 0.01
    said: list[str] = []
    assert chosen_threshold(model, detector, None, said.append).value == 0.5
    assert "was calibrated for other weights" in said[0]


def test_a_precision_out_of_reach_is_said_and_nothing_is_kept(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        detect_command(model, calibrate=data, precision=1.0, corruption=0.05, json_output=True)
    assert left.value.code == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["reached"], values["wanted_precision"], values["kept"]) == (False, 1.0, None)
    assert 0 < values["precision"] < 1
    assert not (model / CALIBRATION_NAME).exists()
    with pytest.raises(SystemExit):
        detect_command(model, calibrate=data, precision=1.0, corruption=0.05)
    printed = capsys.readouterr().out
    assert "no threshold reaches precision 1 on this text" in printed
    assert f"the most precise is {values['threshold']:.4f}: precision {values['precision']:.3f}" in printed


@pytest.mark.usefixtures("unverified")
def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("discern.inference.calibration.write_json", refuse)
    said: list[str] = []
    values = calibrate(model, data, Silent(), said.append, precision=0.5, corruption=0.3)
    assert values["kept"] is None
    assert "Permission denied" in said[0]
    assert "--threshold" in said[0]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("content", ["", "[]", '{"format": 1, "threshold": 7}', '{"format": 2}'])
def test_a_damaged_calibration_is_named(content: str, model: Path) -> None:
    (model / CALIBRATION_NAME).write_text(content)
    with pytest.raises(DataError, match=r"detection\.json (is damaged|has format 2)") as caught:
        chosen_threshold(model, load_detector(model, pytest.fail), None, pytest.fail)
    assert "--threshold" in str(caught.value.hint)


def test_a_model_without_a_generator_is_refused(tmp_path: Path, data: Path) -> None:
    make_run(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "alone", progress=Silent(), warn=pytest.fail)
    with pytest.raises(ConfigError, match="has no generator") as caught:
        found(tmp_path / "alone", data, 0.5)
    assert "--all-networks" in str(caught.value.hint)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, data: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(DataError, match="a different tokenizer") as caught:
        found(tmp_path / "run", data, 0.5)
    assert "--tokenizer" in str(caught.value.hint)


def test_too_little_text_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The river rises.\n\nIt was built in the town.\n")
    for heldout, said in ((0.5, "has too little held-out text"), (0.0, "has no held-out split")):
        out = prepared(tmp_path / "a.txt", tmp_path / f"data{heldout}", heldout)
        with pytest.raises(DataError, match=said):
            found(model, out, 0.5)


def test_an_export_is_replaced_calibration_and_all(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for _ in range(2):
        export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
        assert not (tmp_path / "out" / CALIBRATION_NAME).exists()
        (tmp_path / "out" / CALIBRATION_NAME).write_text("{}")
