"""The variants of peers_cpu.py: functions of a checkpoint that return a function of a batch.

    python benchmarks/peers_cpu_variants.py FILE

FILE is a pickle of peers_cpu.py. The command loads one variant, runs it on every batch, and prints
the largest memory that the process had, in bytes: first after its imports, then at the end.
"""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import fastplm
from harness import Unavailable

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

#: New tokens of a sequence in "generate".
NEW = 32
#: The rate of "train".
RATE = 1e-4


@dataclass
class Batch:
    """A model's inputs; ``texts`` has the texts or pairs behind them, if the ids are not random."""

    inputs: dict[str, Tensor]
    texts: list[Any]


Run = Callable[[Batch], Any]


@dataclass
class Given:
    """A checkpoint, ``folder/model``; other files in ``folder`` are made of it.

    Args:
        task: "embed", "rerank", "tag", "generate" or "train".
        folder: where the files are.
        examples: batches from which a runtime may take the ranges of what it rounds to int8.
        beams: beams of "generate".
    """

    task: str
    folder: Path
    examples: list[Batch]
    beams: int = 1

    @property
    def checkpoint(self) -> Path:
        return self.folder / "model"

    @property
    def output(self) -> str:
        return "last_hidden_state" if self.task == "embed" else "logits"

    def model(self) -> Any:
        config = transformers.AutoConfig.from_pretrained(self.checkpoint)
        return getattr(transformers, config.architectures[0]).from_pretrained(self.checkpoint)

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """A file or folder, made when it is first asked for."""
        path = self.folder / name
        if not path.exists():
            make(path)
        return path


class Variant(NamedTuple):
    """A way to run a checkpoint.

    Args:
        package: the row has its version.
        make: returns a function of a batch.
        exact: the weights are in fp32, so the outputs must agree.
    """

    package: str
    make: Callable[[Given], Run]
    exact: bool = True


# --- PyTorch --------------------------------------------------------------------------------------


def forward(given: Given, model: Any) -> Run:
    def run(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return getattr(model(**batch.inputs), given.output)

    return run


def generation(given: Given, model: Any) -> Run:
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, num_beams=given.beams, pad_token_id=0)

    def run(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return model.generate(**batch.inputs, do_sample=False, **options)[:, -NEW:]

    return run


def training(given: Given, model: Any) -> Run:
    """Each call is a step, and returns the loss before it."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE)

    def run(batch: Batch) -> Tensor:
        loss = model(**batch.inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def of_torch(change: Callable[[Any], Any]) -> Callable[[Given], Run]:
    runs = {"generate": generation, "train": training}
    return lambda given: runs.get(given.task, forward)(given, change(given.model()))


def same(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module, lengths: bool = True) -> Any:
    """For any length, or for the first batch's alone."""
    torch.compiler.reset()  # PyTorch compiles a function no more than a few times
    return torch.compile(model, dynamic=lengths)


def torch_int8(model: nn.Module) -> nn.Module:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    return quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig})


def frozen(model: Any) -> Any:
    return fastplm.freeze(fastplm.accelerate(model))


def fastplm_int8(model: nn.Module) -> nn.Module:
    return fastplm.freeze(fastplm.quantize(fastplm.accelerate(model)))


def of_cross_encoder(change: Callable[[Any], Any]) -> Callable[[Given], Run]:
    """From text: the tokenizer's time counts."""

    def make(given: Given) -> Run:
        from sentence_transformers import CrossEncoder

        if not given.examples[0].texts:
            raise Unavailable("it needs texts and a tokenizer")
        model = change(CrossEncoder(str(given.checkpoint), device="cpu"))
        options = dict(activation_fn=nn.Identity(), show_progress_bar=False)

        def run(batch: Batch) -> Any:
            scores = model.predict(batch.texts, batch_size=len(batch.texts), **options)
            return scores.reshape(-1, 1)

        return run

    return make


# --- ONNX Runtime and OpenVINO --------------------------------------------------------------------


class Positional(nn.Module):
    """A model with its inputs by position, as ONNX's exporter passes them."""

    def __init__(self, model: nn.Module, names: list[str], output: str) -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.output)


def exported(given: Given) -> Path:
    """The model as an ONNX file of any batch and length."""

    def make(path: Path) -> None:
        model = given.model()
        model.set_attn_implementation("eager")
        inputs = {name: torch.ones(2, 8, dtype=torch.long) for name in given.examples[0].inputs}
        axes = {0: "batch", 1: "length"}
        torch.onnx.export(
            Positional(model, list(inputs), given.output),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=["output"],
            dynamic_axes=dict.fromkeys(inputs, axes)
            | {"output": {0: "batch"} if given.task == "rerank" else axes},
            dynamo=False,
            opset_version=17,
        )

    return given.made("model.onnx", make)


def fused(given: Given) -> Path:
    """With ONNX Runtime's own fused attention, layer norm and GELU."""

    def make(path: Path) -> None:
        from onnxruntime.transformers import optimizer

        config = transformers.AutoConfig.from_pretrained(given.checkpoint)
        heads, width = config.num_attention_heads, config.hidden_size
        options = dict(model_type="bert", num_heads=heads, hidden_size=width)
        optimizer.optimize_model(str(exported(given)), **options).save_model_to_file(str(path))

    return given.made("fused.onnx", make)


def onnx_int8(given: Given) -> Path:
    def make(path: Path) -> None:
        from onnx import TensorProto
        from onnxruntime.quantization import quantize_dynamic

        # Shapes are not known behind a fused operation, and so is no type.
        options = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(fused(given), path, per_channel=True, extra_options=options)

    return given.made("int8.onnx", make)


def of_session(file: Callable[[Given], Path]) -> Callable[[Given], Run]:
    def make(given: Given) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        path = str(file(given))
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])

        def run(batch: Batch) -> Any:
            return session.run(None, {name: each.numpy() for name, each in batch.inputs.items()})[0]

        return run

    return make


def openvino_int8(given: Given) -> Path:
    """Weights and activations in int8, with ranges from the examples."""

    def make(path: Path) -> None:
        import nncf
        import openvino

        examples = [
            {name: each.numpy() for name, each in batch.inputs.items()} for batch in given.examples
        ]
        model = nncf.quantize(
            openvino.Core().read_model(str(exported(given))),
            nncf.Dataset(examples),
            model_type=nncf.ModelType.TRANSFORMER,
        )
        openvino.save_model(model, str(path), compress_to_fp16=False)

    return given.made("int8.xml", make)


def of_openvino(file: Callable[[Given], Path]) -> Callable[[Given], Run]:
    def make(given: Given) -> Run:
        import openvino

        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        model = openvino.Core().compile_model(str(file(given)), "CPU", settings)
        request, output = model.create_infer_request(), model.output(0)

        def run(batch: Batch) -> Any:
            inputs = {name: each.numpy() for name, each in batch.inputs.items()}
            return request.infer(inputs, share_inputs=True)[output]

        return run

    return make


# --- CTranslate2 ----------------------------------------------------------------------------------


class Ids:
    """A tokenizer for the converter: each token's text is its id."""

    def __init__(self, config: Any) -> None:
        self.size = config.vocab_size
        self.pad_token = self.unk_token = "0"
        self.bos_token = self.eos_token = str(config.eos_token_id)

    def get_vocab(self) -> dict[str, int]:
        return {str(id): id for id in range(self.size)}

    def convert_ids_to_tokens(self, id: int) -> str:
        return str(id)


def converted(given: Given) -> str:
    def make(path: Path) -> None:
        from ctranslate2.converters import TransformersConverter

        class Converter(TransformersConverter):
            def load_model(self, kind: Any, name: str, **options: Any) -> Any:
                model = kind.from_pretrained(name, **options)
                model.config.position_embedding_type = "absolute"  # which BERT's has no longer
                return model

            def load_tokenizer(self, kind: Any, name: str, **options: Any) -> Ids:
                return Ids(transformers.AutoConfig.from_pretrained(name))

        Converter(str(given.checkpoint)).convert(str(path))

    return str(given.made("ctranslate2", make))


def of_ctranslate2(kind: str) -> Callable[[Given], Run]:
    """The encoder is CTranslate2's; a head on it is PyTorch's."""

    def make(given: Given) -> Run:
        import ctranslate2

        options = dict(compute_type=kind, intra_threads=torch.get_num_threads())
        if given.task == "generate":
            return ctranslate2_generation(given, options)
        encoder = ctranslate2.Encoder(converted(given), **options)
        head = None
        if given.task != "embed":  # saved by itself, as its process needs no other weights
            path = given.made("head.pt", lambda path: torch.save(given.model().classifier, path))
            head = torch.load(path, weights_only=False)
        state = "pooler_output" if given.task == "rerank" else "last_hidden_state"

        def run(batch: Batch) -> Any:
            ids, mask, *types = (each.int().numpy() for each in batch.inputs.values())
            view = ctranslate2.StorageView.from_array
            lengths = view(mask.sum(1, dtype=np.int32))
            types = [types[0].tolist()] if types else []
            states = np.asarray(getattr(encoder.forward_batch(view(ids), lengths, *types), state))
            if head is None:
                return states
            with torch.inference_mode():
                return head(torch.from_numpy(states))

        return run

    return make


def ctranslate2_generation(given: Given, options: dict[str, Any]) -> Run:
    import ctranslate2

    def tokens(batch: Batch) -> list[list[str]]:
        return [list(map(str, ids)) for ids in batch.inputs["input_ids"].tolist()]

    config = transformers.AutoConfig.from_pretrained(given.checkpoint)
    if config.is_encoder_decoder:
        translator = ctranslate2.Translator(converted(given), **options)
        limits = dict(min_decoding_length=NEW, max_decoding_length=NEW, beam_size=given.beams)

        def run(batch: Batch) -> Any:
            results = translator.translate_batch(tokens(batch), **limits)
            return np.array([result.hypotheses[0] for result in results], dtype=int)

        return run
    generator = ctranslate2.Generator(converted(given), **options)
    limits = dict(min_length=NEW, max_length=NEW, beam_size=given.beams)

    def run(batch: Batch) -> Any:
        limits["include_prompt_in_result"] = False
        results = generator.generate_batch(tokens(batch), **limits)
        return np.array([result.sequences_ids[0] for result in results])

    return run


# --- the tables -----------------------------------------------------------------------------------

STOCK = "transformers sdpa"
TRAINING = {
    STOCK: Variant("transformers", of_torch(same)),
    "torch.compile": Variant("torch", of_torch(partial(compiled, lengths=False))),
    "fastplm": Variant("fastplm", of_torch(fastplm.accelerate)),
}
GENERATION = {
    STOCK: TRAINING[STOCK],
    "ctranslate2": Variant("ctranslate2", of_ctranslate2("float32")),
    "ctranslate2 int8": Variant("ctranslate2", of_ctranslate2("int8"), exact=False),
    "fastplm": Variant("fastplm", of_torch(frozen)),
    "fastplm int8": Variant("fastplm", of_torch(fastplm_int8), exact=False),
}
ENCODING = {
    STOCK: TRAINING[STOCK],
    "torch.compile": Variant("torch", of_torch(compiled)),
    "torch int8": Variant("torch", of_torch(torch_int8), exact=False),
    "onnxruntime": Variant("onnxruntime", of_session(exported)),
    "onnxruntime fused": Variant("onnxruntime", of_session(fused)),
    "onnxruntime int8": Variant("onnxruntime", of_session(onnx_int8), exact=False),
    "openvino": Variant("openvino", of_openvino(exported)),
    "openvino int8": Variant("openvino", of_openvino(openvino_int8), exact=False),
    **GENERATION,
}
VARIANTS: dict[str, dict[str, Variant]] = {
    "embed": ENCODING,
    "rerank": {
        **ENCODING,
        "CrossEncoder": Variant("sentence-transformers", of_cross_encoder(same)),
        "CrossEncoder, fastplm": Variant("sentence-transformers", of_cross_encoder(frozen)),
    },
    "tag": ENCODING,
    "generate": GENERATION,
    "train": TRAINING,
}


def peak() -> int:
    """The largest memory that this process had, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main() -> None:
    name, threads, given, batches = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(threads)
    variant = VARIANTS[given.task][name]
    importlib.import_module(variant.package.replace("-", "_"))
    imported = peak()
    run = variant.make(given)
    for batch in batches:
        run(batch)
    print(json.dumps([imported, peak()]))


if __name__ == "__main__":
    main()
