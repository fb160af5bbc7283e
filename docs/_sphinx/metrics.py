"""The metrics that discern writes: what each one is, its unit, its range and what is usual. The reference lists them.

Names ending in `_loss` are means in nats. An evaluation writes a loss as `heldout_...`, because the step may have a training loss
of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["log", "evaluation", "task"]


@dataclass(frozen=True)
class Metric:
    """What a metric is.

    Attributes:
        name: as in `metrics.jsonl`, `discern evaluate --json` or `results.json`.
        where: 'log': every record of `metrics.jsonl`; 'evaluation': held-out text; 'task': fine-tuned models.
        meaning: what it is, in one sentence without a full stop.
        unit: "nats", "s", "fraction", ...; "" for a plain number.
        range: smallest and largest possible value, in words.
        usual: what to expect; "" if that depends on text or task alone.
    """

    name: str
    where: Where
    meaning: str
    unit: str = ""
    range: str = "0 and more"
    usual: str = ""


def _fraction(name: str, where: Where, meaning: str, usual: str = "") -> Metric:
    return Metric(name, where, meaning, "fraction", "0 to 1", usual)


def _correlation(name: str, where: Where, meaning: str, usual: str = "") -> Metric:
    return Metric(name, where, meaning, "correlation", "-1 to 1", usual)


_AT_STEP_0 = "ln V at step 0 for a vocabulary of V entries: 9.0 for 8,192, 10.3 for 30,522"

METRICS = (
    Metric("step", "log", "updates of the weights so far"),
    Metric("tokens", "log", "real tokens read so far, without padding", "tokens"),
    Metric("seconds", "log", "time of training so far, over all interruptions", "s"),
    Metric("tokens_per_second", "log", "real tokens per second since the last record", "tokens/s"),
    _fraction("data_share", "log", "part of the time spent waiting for data", usual="up to 0.05"),
    _fraction("host_share", "log", "part of the time that a GPU waits for the host", usual="up to 0.2; on a GPU only"),
    _fraction("device_share", "log", "the remaining part of the time, in which the GPU or the CPU computes"),
    _fraction("padding_fraction", "log", "part of the positions that are padding, in fine-tuning"),
    Metric("learning_rate", "log", "learning rate of the step"),
    Metric("grad_norm", "log", "norm of the gradients of all networks together, before clipping"),
    Metric("flops", "log", "FLOPs of the matrix products executed so far", "FLOPs"),
    Metric(
        "energy_joules",
        "log",
        "energy that processors and NVIDIA GPUs have used so far, other programs included; only where the machine tells",
        "J",
    ),
    Metric("peak_memory_bytes", "log", "peak memory, of all processes together", "bytes"),
    Metric("loss", "log", "the loss that is minimized: the weighted sum of the others", "nats"),
    Metric("generator_loss", "log", "cross-entropy of the generator at the masked positions", "nats", usual=_AT_STEP_0),
    Metric(
        "discriminator_loss",
        "log",
        "binary cross-entropy of 'replaced' over all real tokens",
        "nats",
        usual="ln 2 = 0.69 at step 0; then at most the entropy of the fraction replaced, 0.42 for 15%",
    ),
    Metric("mlm_loss", "log", "cross-entropy of the encoder at the positions of its loss", "nats", usual=_AT_STEP_0),
    Metric("teacher_loss", "log", "KL divergence of the encoder from its teacher at these positions, times T^2", "nats"),
    Metric("causal_lm_loss", "log", "cross-entropy of each token given those before it, for hybrid", "nats", usual=_AT_STEP_0),
    Metric("correction_loss", "log", "cross-entropy of the original token, copied or written by the discriminator", "nats"),
    Metric("permutation_lm_loss", "log", "cross-entropy at the predicted positions", "nats", usual=_AT_STEP_0),
    Metric("next_sentence_loss", "log", "binary cross-entropy of 'the second segment follows the first'", "nats"),
    Metric("sentence_loss", "log", "binary cross-entropy of the sentence-contrastive term", "nats"),
    Metric("baseline_loss", "log", "cross-entropy of the reward's baseline, in adversarial training", "nats"),
    Metric("adversarial_loss", "log", "surrogate of the generator's reward; its value has no meaning", "", "any number"),
    Metric(
        "generator_entropy", "log", "mean entropy of the generator's distribution, in adversarial training", "nats", usual="falls"
    ),
    _fraction(
        "generator_accuracy",
        "evaluation",
        "fraction of the masked tokens that the generator predicts correctly",
        usual="0.05 where only word frequencies are known; 0.26 and 0.40 measured after an hour on two cores",
    ),
    _fraction(
        "sampled_accuracy",
        "evaluation",
        "fraction of the generator's samples that are the original token",
        usual="0.006 with word frequencies alone, 0.04 once it learns; above 0.6 the generator is too strong",
    ),
    _fraction(
        "replaced_fraction",
        "evaluation",
        "fraction of all tokens that its samples replaced; for replace-mlm, fraction of the chosen tokens",
        usual="0.40 to 0.98 of the fraction chosen: 0.06 to 0.147 at 15%",
    ),
    _fraction(
        "discriminator_accuracy",
        "evaluation",
        "fraction of the tokens classified correctly at 1/2",
        usual=("at least 1 - replaced_fraction: 'original' everywhere reaches that, so look at the AUC instead"),
    ),
    _fraction(
        "discriminator_auc",
        "evaluation",
        "chance that a sample of its generator looks more suspicious than an original token; 0.5 is guessing",
        usual="0.5 to 0.6 at first; 0.76 for cpu-small after an hour. Falls if the generator gets better",
    ),
    _fraction(
        "discriminator_precision",
        "evaluation",
        "fraction of the tokens marked as replaced that were replaced",
        usual="0 while nothing is marked",
    ),
    _fraction(
        "discriminator_recall",
        "evaluation",
        "fraction of the replaced tokens that were marked",
        usual="0.02 and more; 0.000 in runs that do not learn",
    ),
    _fraction("mlm_accuracy", "evaluation", "fraction of the positions of the loss that are predicted correctly"),
    _fraction(
        "causal_lm_accuracy", "evaluation", "fraction of the tokens predicted correctly from those before them, for hybrid"
    ),
    _fraction("masked_accuracy", "evaluation", "the same at the chosen positions, for all-tokens-mlm"),
    _fraction("copy_probability", "evaluation", "mean probability of copying the input token, for all-tokens-mlm"),
    _fraction("permutation_lm_accuracy", "evaluation", "fraction of the predicted positions predicted correctly"),
    _fraction("next_sentence_accuracy", "evaluation", "fraction of the segment pairs classified correctly", usual="0.5 at first"),
    _fraction("next_sentence_share", "evaluation", "fraction of the segment pairs in which B follows A", usual="about 0.5"),
    _fraction("sentence_accuracy", "evaluation", "fraction of the texts classified correctly as changed or not"),
    Metric("energy", "evaluation", "mean energy of the tokens that are not noise, for electric", "nats", "any number"),
    _fraction("noise_fraction", "evaluation", "fraction of the tokens drawn from the noise distribution, for electric"),
    _fraction("expected_calibration_error", "evaluation", "mean difference of predicted and true fraction of replaced tokens"),
    _fraction("accuracy", "task", "fraction of the examples, or of the words, predicted correctly"),
    _fraction("f1", "task", "harmonic mean of precision and recall: of spans, of the positive class, or of an answer's words"),
    _fraction("macro_f1", "task", "F1 of each class, averaged over the classes"),
    _fraction("micro_f1", "task", "F1 over all labels of all examples together"),
    _fraction("precision", "task", "fraction of the predicted spans that are right"),
    _fraction("recall", "task", "fraction of the given spans that are predicted"),
    _fraction("exact_match", "task", "fraction of the answers, or of the label sets, that are exactly right"),
    _correlation("matthews", "task", "Matthews correlation of predicted and given classes", usual="0 is guessing"),
    _correlation("pearson", "task", "linear correlation of predicted and given numbers", usual="0 is guessing"),
    _correlation("spearman", "task", "rank correlation of predicted and given numbers", usual="0 is guessing"),
    _fraction("ndcg_at_10", "task", "gain of the first ten documents found, discounted by rank, over that of the best order"),
    _fraction("mrr", "task", "mean of one over the rank of the first relevant document"),
    *(
        _fraction(f"recall_at_{number}", "task", f"fraction of the relevant documents among the first {number} found")
        for number in (1, 5, 10, 100)
    ),
    Metric("mean_absolute_error", "task", "mean absolute difference", "the labels' unit"),
)
"""Every metric with a fixed name."""
