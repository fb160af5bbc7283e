"""README.md of a fine-tuned export: what the model tells, how well, how it was made. Facts only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from discern.interop.finetuned import HeadWeights, OwnHead
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.markdown import code, escaped, markdown_table
from discern.interop.model_card import NOT_STATED, UNKNOWN, language_line
from discern.interop.names import HEAD_NAME

_SHOWN = 40


@dataclass(frozen=True)
class TaskFacts:
    """What the workflow knows of a fine-tuned model.

    Attributes:
        title: heading of the card.
        task: its name.
        base: the model that was fine-tuned, in words.
        seed: whose weights these are.
        max_length: tokens of a row, [CLS] and [SEP] included.
        tokenizer: kind and casing, in words.
        pairs: whether it reads two texts.
        results: of the task, as results.json has them; empty: none.
        seeds: that were run.
        of_seed: the headline of this seed.
        settings: of the fine-tuning, by dotted key.
        versions: of discern and the libraries.
        language: code of the language of the text that the model was pre-trained on.
        text_license: of that text, as whoever prepared it said.
    """

    title: str
    task: str
    base: str
    seed: int
    model: HuggingFaceModel
    head: HeadWeights | OwnHead
    max_length: int
    tokenizer: str
    pairs: bool
    results: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    of_seed: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    text_license: str | None = None


def task_card(facts: TaskFacts) -> str:
    """The whole README.md."""
    sections: tuple[Callable[[TaskFacts], str], ...] = (_front_matter, _what, _use, _evaluation, _recipe, _limits)
    return "\n\n".join(section(facts) for section in sections) + "\n"


_TAGS = {"classification": "text-classification", "tagging": "token-classification", "span": "question-answering"}


def _front_matter(facts: TaskFacts) -> str:
    library = "discern" if isinstance(facts.head, OwnHead) else "transformers"
    return (
        "---\n"
        "# Fill in the license of these weights. The licenses of the training texts may restrict the choice.\n"
        f"license:\n{language_line(facts.language)}library_name: {library}\npipeline_tag: {_TAGS[facts.head.kind]}\ntags:\n"
        f"- {facts.model.config['model_type']}\n- discern\n---"
    )


def _what(facts: TaskFacts) -> str:
    config, head = facts.model.config, facts.head
    labels = tuple(dict.fromkeys(head.labels))
    reads = "a pair of texts" if facts.pairs else "a text"
    says = {
        "classification": {
            "single": f"It assigns {reads} to one of {len(labels)} classes.",
            "multi": f"It assigns {reads} to any number of {len(labels)} classes.",
            "regression": f"It gives {reads} a score.",
        }[head.problem],
        "tagging": f"It assigns one of {len(labels)} tags to every word, by the first token of the word.",
        "span": "It finds the answer to a question in a context; the answer [CLS] means that there is none.",
    }[head.kind]
    shown = ", ".join(code(label) for label in labels[:_SHOWN])
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    loads = f"`{config['architectures'][0]}`"
    if isinstance(head, OwnHead):
        loads += f" (the encoder alone); the head is stored in `{HEAD_NAME}`, which discern reads"
    rows = {
        "Task": escaped(facts.task),
        "Labels": f"{shown}{more}" if head.labels else "none",
        "Loads as": loads,
        "Parameters": f"{facts.model.num_parameters:,}",
        "Weights stored as": config["dtype"],
        "Longest row": f"{facts.max_length} tokens, `[CLS]` and `[SEP]` included",
        "Vocabulary": f"{config['vocab_size']:,} entries; {facts.tokenizer}",
        "Fine-tuned from": escaped(facts.base),
        "Licence": "to be filled in by whoever publishes this model",
    }
    return f"# {escaped(facts.title)}\n\n{says}\n\n{markdown_table(('', ''), list(rows.items()))}"


def _use(facts: TaskFacts) -> str:
    if isinstance(facts.head, OwnHead):
        lines = _DISCERN.format(texts=_EXAMPLES.get(facts.head.kind, '["A text."]'))
        return (
            f"## Use\n\ntransformers has no class for this head; discern (`pip install discern-nlp`) reads it:\n\n{_block(lines)}"
        )
    if facts.head.kind == "tagging" and marks_spans(facts.head.labels):
        # A model of 16 bits computes in 16 bits unless told otherwise.
        more = "" if facts.model.config["dtype"] == "float32" else ', dtype="float32"'
        return f"## Use\n\n{_block(_PIPELINE.format(more=more))}\n\n{_FIRST}"
    load = ".eval()" if facts.model.config["dtype"] == "float32" else ".float().eval()"
    name = {"classification": "SequenceClassification", "tagging": "TokenClassification", "span": "QuestionAnswering"}[
        facts.head.kind
    ]
    texts = '"A question?", "A text that may hold the answer."' if facts.head.kind == "span" else '"A text."'
    texts = '"One text.", "Another one."' if facts.pairs and facts.head.kind == "classification" else texts
    return f"## Use\n\n{_block(_CODE.format(name=name, load=load, texts=texts, what=_OUTPUTS[_output(facts)]))}"


def _block(code: str) -> str:
    return f"```python\n{code}\n```"


def marks_spans(labels: Sequence[str]) -> bool:
    """Whether tags mark spans (`B-LOC`), so that transformers can put words together; parts of speech mark none."""
    return any(label.startswith(("B-", "I-")) for label in labels)


_DISCERN = """import discern

model = discern.load(".")  # this folder
print(model.predict({texts}))"""
_EXAMPLES = {"span": '[("A question?", "A text that may hold the answer.")]'}
_PIPELINE = """from transformers import pipeline

tagger = pipeline("token-classification", model=".", aggregation_strategy="first"{more})  # "." is this folder
for found in tagger("A text."):
    print(found["entity_group"], found["word"], found["start"], found["end"], found["score"])"""
_FIRST = (
    'Keep `aggregation_strategy="first"`: the model was trained to tag a word by its first token, and its output for the other '
    "tokens is meaningless. The pipeline splits words at punctuation (`U.S.` becomes four words); "
    "`discern.load(folder).predict([words])` takes a list of words as they are."
)


_CODE = """import torch
from transformers import AutoModelFor{name}, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelFor{name}.from_pretrained(folder){load}
inputs = tokenizer({texts}, truncation=True, return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
{what}"""
_OUTPUTS = {
    "single": "for place, probability in enumerate(outputs.logits[0].softmax(-1).tolist()):\n"
    '    print(f"{probability:.3f} {model.config.id2label[place]}")',
    "multi": "for place, probability in enumerate(outputs.logits[0].sigmoid().tolist()):\n"
    '    print(f"{probability:.3f} {model.config.id2label[place]}")',
    "regression": "print(outputs.logits[0, 0].item())",
    "tagging": "for token, place in zip(inputs.tokens(), outputs.logits[0].argmax(-1).tolist()):\n"
    "    print(token, model.config.id2label[place])",
    "span": "first, last = outputs.start_logits[0].argmax(), outputs.end_logits[0].argmax()\n"
    'print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))',
}


def _output(facts: TaskFacts) -> str:
    return facts.head.problem if facts.head.kind == "classification" else facts.head.kind


def _evaluation(facts: TaskFacts) -> str:
    results = facts.results
    if not results or results.get("median") is None:
        return f"## Evaluation\n\n{UNKNOWN.capitalize()}."
    several = len(facts.seeds) > 1
    head = "median of the seeds" if several else "value"
    rows = [(code(name), f"{value:.4f}") for name, value in results["metrics"].items()]
    lines = [
        f"On {escaped(results['split'])}, {results['examples']:,} examples, "
        + (f"over {len(facts.seeds)} seeds ({', '.join(map(str, facts.seeds))})." if several else f"of seed {facts.seed}.")
        + " Losses are means in nats."
    ]
    if several:
        own = "" if facts.of_seed is None else f" The weights are those of seed {facts.seed}: {facts.of_seed:.4f}."
        lines.append(
            f"{code(results['metric'])}: mean {results['mean']:.4f}, standard deviation {results['standard_deviation']:.4f}, "
            f"from {results['worst']:.4f} to {results['best']:.4f}.{own} "
            "The best of several seeds is optimistic: report the median."
        )
    if results.get("selected_on") == results["split"]:
        chose = escaped(results["selected_on"])
        lines.append(f"The weights were chosen by the scores on {chose}, so these scores are slightly optimistic.")
    for seed, reason in results.get("failed_seeds", {}).items():
        lines.append(f"Seed {escaped(seed)} failed: {escaped(reason)}.")
    return "## Evaluation\n\n" + "\n\n".join([*lines, markdown_table(("figure", head), rows)])


def _recipe(facts: TaskFacts) -> str:
    rows = [(code(key), escaped(value)) for key, value in facts.settings.items()]
    trained = facts.results.get("train_examples")
    made = escaped(", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    lines = [f"Fine-tuned on {trained:,} examples." if trained else "", f"Made with {made}." if made else ""]
    return "## Recipe\n\n" + " ".join(filter(None, lines)) + f"\n\n{markdown_table(('setting', 'value'), rows)}"


def _limits(facts: TaskFacts) -> str:
    limits = [f"It was trained on rows of up to {facts.max_length} tokens: `truncation=True` cuts to that."]
    if facts.head.kind == "classification":
        if facts.pairs:
            limits.append(
                "Where both texts of a pair are too long, discern cuts them to equal lengths and gives an odd token to the "
                "first, transformers to the longer."
            )
        if facts.model.config["model_type"] == "electra":
            limits.append(
                "The head has a linear layer; `ElectraForSequenceClassification` computes the same with two. Fine-tuned further "
                "in transformers, the two are trained."
            )
    limits.append(f"License of the text that the model was pre-trained on: {escaped(facts.text_license or NOT_STATED)}.")
    limits.append(f"Source and license of the texts that it was fine-tuned on: {UNKNOWN}.")
    limits.append(f"Tests for bias, safety and fitness for any purpose: {UNKNOWN}.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)
