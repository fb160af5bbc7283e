"""Writes a model as an ONNX file, in float32 or with weights of eight bits, and runs such files with onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from discern import kernels
from discern.convert.onnx_graph import Graph
from discern.errors import ConfigError
from discern.storage.files import write_file

Feed = Mapping[str, NDArray[np.int64]]
"""Inputs by name: `input_ids`, `attention_mask` and `token_type_ids`, each (B, L)."""
Found = dict[str, NDArray[np.float32]]
"""Outputs by name, as in `Graph.outputs`."""
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# A file of ONNX is one message of protocol buffers, which are limited to 2 GiB.
_MOST_BYTES = 2**31 - 2**24
_MEBIBYTE = 2**20


def check_onnx() -> None:
    """Raise a ConfigError if a package is missing that writes or runs ONNX."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {' and '.join(missing)}", hint="pip install 'discern-nlp[onnx]'")


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a model, in float32, with any number of rows of any length as input.

    The same weights give the same bytes. The file contains no names of source files, which the exporter would leave in it.

    Raises:
        ConfigError: the weights are too large for one file.
    """
    held = sum(parameter.numel() for parameter in graph.parameters()) * 4
    if held > _MOST_BYTES:
        raise ConfigError(
            f"the weights take {held / _MEBIBYTE:,.0f} MiB, and an ONNX file holds at most {_MOST_BYTES / _MEBIBYTE:,.0f} MiB",
            hint="leave out --onnx, and serve the model with transformers",
        )
    import onnx
    import onnxscript

    # One tensor each: the same tensor twice would become the same input.
    given = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in graph.inputs)
    with _quiet(), kernels.switched_off(), torch.no_grad():
        program: Any = torch.onnx.export(
            graph,
            given,
            dynamo=True,
            verbose=False,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=tuple({0: "batch", 1: "length"} for _ in given),
            external_data=False,
        )
        # Without its limits, so that products of weights, such as those of queries, keys and values side by side, are constants.
        onnxscript.optimizer.optimize_ir(program.model, input_size_limit=_MOST_BYTES, output_size_limit=_MOST_BYTES)
        model = program.model_proto
    _strip(model)
    onnx.checker.check_model(model)
    write_file(path, model.SerializeToString(deterministic=True))


def quantize(source: Path, out: Path, *, per_channel: bool) -> None:
    """Write a copy whose matrices have eight bits, and whose products are computed in integers.

    The inputs of the products are quantized at run time ("dynamic quantization"); LayerNorm, softmax and GELU stay in float32.

    Args:
        per_channel: one scale for each column of a matrix, rather than one for the whole matrix.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(str(source)).graph
    matrices = {each.name for each in graph.initializer if len(each.dims) == 2}
    # Products of two computed matrices, as in attention, would lose more than they gain; those with a vector cannot be quantized.
    others = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in matrices]
    with _quiet():
        quantize_dynamic(source, out, per_channel=per_channel, weight_type=QuantType.QInt8, nodes_to_exclude=others)


class Session:
    """An ONNX file in onnxruntime, on the CPU, with as many threads as torch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names = [each.name for each in self._session.get_outputs()]

    def __call__(self, feed: Feed) -> Found:
        """The outputs for a batch."""
        return dict(zip(self._names, self._session.run(None, dict(feed)), strict=True))


def run_graph(graph: Graph, feed: Feed) -> Found:
    """The outputs of the model itself, for a batch."""
    with torch.inference_mode():
        found = graph(*(torch.from_numpy(feed[name]) for name in graph.inputs))
    return {name: tensor.float().numpy() for name, tensor in zip(graph.outputs, found, strict=True)}


def _strip(model: Any) -> None:
    """Remove what describes where in the source code each node comes from."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks of libraries, about packages that are not needed and steps that would change nothing here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
