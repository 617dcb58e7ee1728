"""Knowledge distillation: trains a smaller student from a teacher and text."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import fastplm.models
from fastplm.data import PretrainingStream, TokenStore, load_tokenizer, train_tokenizer
from fastplm.data._folder import file_hash
from fastplm.distill.data import (
    ParallelCollator,
    ParallelText,
    PlainCollator,
    parallel_lines,
    parallel_stores,
)
from fastplm.distill.objectives import KINDS, Distillation, uniform_layers
from fastplm.distill.settings import UNCOUNTED, DistillArguments
from fastplm.errors import DataError
from fastplm.models._base import most_positions
from fastplm.pretrain.data import (
    HELD_OUT,
    HELD_OUT_SAMPLES,
    RunData,
    held_out_collator,
    make_collator,
    prepare_data,
)
from fastplm.pretrain.settings import PretrainArguments, PretrainPlan
from fastplm.pretrain.stream import StreamRun
from fastplm.pretrain.trainer import DETECTION_COUNTS, PretrainingTrainer, detection
from fastplm.run.budget import described
from fastplm.run.checkpoint import check_vocabulary_fits, config_at, set_dropout, weights_at
from fastplm.run.flops import MASKED, flops_a_token
from fastplm.run.losses import counted_labels, tokens_and_sequences
from fastplm.run.report import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback

_ENCODERS = ("bert", "roberta", "albert", "electra")
_DECODERS = ("gpt2",)
#: The files of a model and its tokenizer.
_READ = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")
# `bert.encoder.layer.3.output.dense.weight`, `transformer.h.3.…`,
# `albert.encoder.albert_layer_groups.3.…`: the list of layers, the index and the rest.
_LAYER = re.compile(r"(.*encoder\.layer|.*\bh|.*albert_layer_groups)\.(\d+)\.(.*)")


def distill(args: DistillArguments) -> dict[str, Any]:
    """Train a student; write checkpoints, ``model/``, ``metrics.json``, ``loss.png``.

    A run can be stopped and resumed like a pre-training. Returns the content of ``metrics.json``.

    Raises:
        FastplmError: a model, the corpus, the output folder or a setting is wrong.
    """
    return Distilling(args).run()


class DistillationTrainer(PretrainingTrainer):
    """``PretrainingTrainer`` for models whose batches may have no labels."""

    where = "distill"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for model in self.model.constants():
            model.to(self.args.device)

    @property
    def items(self) -> torch.Tensor:  # type: ignore[override]
        # Given a number, Trainer does not also divide the loss by the number of micro-batches.
        return self._in_step["num_tokens_in_batch"]


class Distilling(StreamRun):
    """A run of ``fastplm distill``."""

    title = "{args.recipe}: distillation"
    # ``facts`` compares the files of these, not their paths.
    free = StreamRun.free | {"teacher", "student", "generator", "translation"}
    args: DistillArguments
    teacher_tokenizer: Any = None
    _model: Any = None
    _translation: str | None = None

    @functools.cached_property
    def teacher(self) -> Any:
        """The teacher, loaded once."""
        return load_model(self.args, "teacher")

    def facts(self) -> dict[str, Any]:
        args = self.args
        paths = {name: getattr(args, name) for name in ("teacher", "student", "generator")}
        models = {
            name: None if path is None else f"files whose hash is {hash_of_model(path)}"
            for name, path in paths.items()
        }
        found = {**super().facts(), **models, "translation": self._translation}
        return found | {"flops": self.args.flops}

    def flops_a_token(self, model: Any) -> float | None:
        """The FLOPs of the student's training and of the teacher's forward.

        None for the recipes that are not counted.
        """
        if self.args.recipe in UNCOUNTED:
            return None
        masked = MASKED if self.args.recipe == "distilbert" else 0.0
        student, teacher = (
            flops_a_token(part.config, self.args.block_size, masked=masked)
            for part in (model.student, model.teacher)
        )
        return student + teacher / 3  # the teacher has no backward

    def flops_a_step(self, model: Any) -> float:
        """The same for an optimizer step of full samples, of a recipe that is counted."""
        args, each = self.args, self.flops_a_token(model)
        assert each is not None
        samples = args.batch_size * args.gradient_accumulation * self.settings.world_size
        return each * samples * args.block_size

    # --- text ---

    def read(self) -> RunData:
        # The models are loaded and checked before the text is tokenized, which may take long.
        causal = _is_causal(self.teacher.config)
        needs = ("eos",) if causal else ("pad", "cls", "sep")
        self.teacher_tokenizer = load_tokenizer(self.args.teacher, needs)
        known = self.teacher.get_input_embeddings().num_embeddings
        check_vocabulary_fits(self.args, "teacher", len(self.teacher_tokenizer), known)
        if self.args.recipe == "multilingual":
            data = self._prepare_pairs()
            self._model = self.make_model(data.tokenizer)
            return data
        self._model = self.make_model(self.teacher_tokenizer)
        if self.args.steps is None:
            self.args = self.args.with_flops(self.flops_a_step(self._model))
        return prepare_data(self._of_pretraining(), self.settings, None)

    def _of_pretraining(self) -> PretrainPlan:
        """The settings of a pre-training that reads the same text."""
        args = self.args
        arch, objective = "bert-tiny", "mlm"
        if args.recipe == "electra":
            arch, objective = "electra-tiny", "rtd"
        elif _is_causal(self.teacher.config):
            arch, objective = "gpt2-tiny", "clm"
        same = [*("corpus", "steps", "out", "block_size", "batch_size", "seed", "cache")]
        same += ["gradient_accumulation", "workers"]
        settings = {name: getattr(args, name) for name in same}
        return PretrainArguments(
            arch=arch, objective=objective, tokenizer=args.teacher, warmup=0, **settings
        ).plan()

    def _prepare_pairs(self) -> RunData:
        args = self.args
        assert args.translation is not None
        with self.settings.main_process_first(desc="preparing the data"):
            lines = parallel_lines(args.corpus, args.translation)
            given = args.student if args.tokenizer is None else args.tokenizer
            if args.vocab_size is not None:
                both = [*lines[0], *lines[1]]
                tokenizer = train_tokenizer(both, args.vocab_size, args.cache)
            else:
                tokenizer = load_tokenizer(given or args.teacher, ("pad", "cls", "sep"))
            stores = parallel_stores(lines, self.teacher_tokenizer, tokenizer, args.cache)
        self._translation = f"lines whose hash is {stores[2].directory.name}"
        count = len(lines[0])
        held_out = min(int(count * HELD_OUT), HELD_OUT_SAMPLES)
        ends = tuple(
            (each.cls_token_id, each.sep_token_id) for each in (self.teacher_tokenizer, tokenizer)
        )
        texts = functools.partial(ParallelText, stores, ends, args.block_size)  # type: ignore
        samples = args.steps * args.gradient_accumulation * args.batch_size
        samples *= self.settings.world_size
        train = PretrainingStream(texts(0, count - held_out), seed=args.seed, length=samples)
        tail = None
        if held_out:
            held = texts(count - held_out, count)
            tail = PretrainingStream(held, seed=args.seed, length=held_out)
        source = stores[1]
        kept = TokenStore(source.directory, 0, int(source.documents[count - held_out]))
        return RunData(tokenizer, source, kept, train, tail, lines[0], (), args.steps)

    # --- models ---

    def make_trainer(self, *callbacks: TrainerCallback) -> tuple[Any, Any]:
        # MiniLM trains only what comes before the attention of the last layer.
        self.settings.ddp_find_unused_parameters = not self._model.trains_all
        collator = self._collator(self.data.tokenizer)
        settings = {"callbacks": list(callbacks)}
        return self.trainer_of(DistillationTrainer, self._model, collator, **settings), collator

    def make_model(self, tokenizer: PreTrainedTokenizerBase) -> Distillation:
        """The untrained model of the recipe, with student and teacher."""
        from transformers import set_seed

        args, teacher = self.args, self.teacher
        set_seed(args.seed)
        student = make_student(args, teacher, tokenizer, self.teacher_tokenizer)
        _check_pair(args, student, teacher)
        kind: Any = KINDS[args.recipe]
        if args.recipe == "electra":
            generator = load_model(args, "generator")
            _check_vocabulary(args, "generator", args.generator, self.teacher_tokenizer)
            return kind(student, teacher, args, generator)
        return kind(student, teacher, args)

    def _collator(self, tokenizer: PreTrainedTokenizerBase, make: Any = make_collator) -> Any:
        if self.args.recipe == "multilingual":
            return ParallelCollator(tokenizer, teacher_tokenizer=self.teacher_tokenizer)
        if self.args.recipe in ("distilbert", "electra"):
            return make(self._of_pretraining(), tokenizer)
        return PlainCollator(tokenizer, block_size=self.args.block_size)

    def lines(self) -> str:
        from fastplm.pretrain.announce import rows_of_run

        data, model = self.data, self.trainer.model
        samples = 0 if data.held_out is None else len(data.held_out)  # type: ignore[arg-type]
        tail = len(data.all) - len(data.store)
        before = {
            "held out": f"{samples:,} samples of the last {tail:,} tokens",
            "vocabulary": f"{len(data.tokenizer):,} tokens",
            "teacher": f"{self.args.teacher}: {_size(model.teacher)}",
            "student": _size(model.student),
            "recipe": self.args.recipe,
        }
        if self.args.flops is not None:
            before["budget"] = described(self.args, self.flops_a_step(model))
        return rows_of_run(self, before, {}, "samples of at most")

    def models(self, model: Any) -> dict[str, Any]:
        return {"model": model.student}

    @torch.no_grad()
    def held_out(self, model: Any, samples: Any) -> dict[str, Any]:
        was_training, device = model.training, next(model.parameters()).device
        model.eval()
        size = self.args.batch_size
        judge = self._collator(self.data.tokenizer, held_out_collator)
        batches = list(DataLoader(samples, batch_size=size, collate_fn=judge))
        tokens, sequences = (
            sum(each) for each in zip(*map(tokens_and_sequences, batches), strict=True)
        )
        labels = (counted_labels(model, batch["labels"]) for batch in batches if "labels" in batch)
        everything = {
            "num_items_in_batch": sum(each.ne(-100).sum() for each in labels),
            "num_tokens_in_batch": tokens,
            "num_sequences_in_batch": sequences,
        }
        sums: dict[str, float] = {}
        for batch in batches:
            moved = {name: value.to(device) for name, value in batch.items()}
            for name, value in model(**moved, **everything).items():
                if name.endswith("_loss") or name in DETECTION_COUNTS:
                    sums[name] = sums.get(name, 0.0) + float(value)
        model.train(was_training)
        result: dict[str, Any] = {"samples": len(samples)}
        result |= {name: value for name, value in sums.items() if name.endswith("_loss")}
        return result | (detection(sums) if "positives" in sums else {})


def _size(model: Any) -> str:
    """The size of a teacher or a student, in words."""
    config, count = model.config, sum(weight.numel() for weight in model.parameters())
    return (
        f"{type(model).__name__}, {counted(config.num_hidden_layers, 'layer')}, "
        f"width {config.hidden_size}, "
        f"{config.num_attention_heads} heads: {count:,} parameters"
    )


# --- students -------------------------------------------------------------------------------------


def make_student(
    args: DistillArguments,
    teacher: Any,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """The student of a run: from a checkpoint, from layers of the teacher, or with new weights."""
    if args.student is not None:
        student = load_model(args, "student", args.dropout)
        if args.recipe != "multilingual":
            _check_vocabulary(args, "student", args.student, teacher_tokenizer)
        return student
    config = copy.deepcopy(teacher.config)
    layers = config.num_hidden_layers
    count = args.student_layers or max(1, layers // 2)
    expected = f"1 to {layers}, the layers of the teacher"
    args.check("student_layers", count <= layers, expected, "Lower it.", count)
    config.num_hidden_layers = count
    groups = getattr(config, "num_hidden_groups", None)  # ALBERT's
    if groups is not None:
        config.num_hidden_groups = min(groups, count)
    new = args.student_hidden is not None or args.student_heads is not None
    if new:
        _change_width(args, config)
    set_dropout(config, args.dropout)
    options = _without_pooler(type(teacher))
    student = type(teacher)._from_config(config, **options)
    if not new:
        choose = uniform_layers if args.recipe == "tinybert" else spread_layers
        chosen = choose(count, layers)
        if groups is not None:
            chosen = spread_layers(config.num_hidden_groups, groups)
        copy_weights(student, teacher, chosen)
    if args.recipe == "multilingual":
        change_vocabulary(student, tokenizer, teacher_tokenizer, copied=not new)
    return student


def spread_layers(count: int, of: int) -> list[int]:
    """Choose ``count`` of ``of`` layers at equal distances, including the first and the last.

    For 6 of 12 these are DistilBERT's layers 0, 2, 4, 7, 9 and 11.
    """
    return [round(index * (of - 1) / max(count - 1, 1)) for index in range(count)]


def copy_weights(student: nn.Module, teacher: nn.Module, layers: list[int]) -> None:
    """Give a student the weights of a teacher of the same width.

    Args:
        student, teacher: models of the same class.
        layers: for each layer of the student, the index of the teacher's layer.
    """
    source = teacher.state_dict()

    def name_in_teacher(name: str) -> str:
        found = _LAYER.fullmatch(name)
        return name if found is None else f"{found[1]}.{layers[int(found[2])]}.{found[3]}"

    student.load_state_dict({name: source[name_in_teacher(name)] for name in student.state_dict()})


@torch.no_grad()
def change_vocabulary(
    student: Any,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    copied: bool,
) -> None:
    """Give a student the embeddings of another vocabulary.

    Args:
        student: a model with the teacher's vocabulary.
        tokenizer, teacher_tokenizer: the tokenizers of the new and of the old vocabulary.
        copied: whether tokens in both vocabularies keep their embedding. All other embeddings are
            initialized like new weights.
    """
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if ours == theirs:
        return
    old = student.get_input_embeddings().weight.clone()
    new = torch.empty(len(tokenizer), old.shape[1], device="cpu").normal_(
        std=student.config.initializer_range
    )
    both = [(index, theirs[token]) for token, index in ours.items() if token in theirs]
    if copied and both:
        target, source = torch.tensor(both, device="cpu").T
        new[target] = old[source]
    student.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    student.get_input_embeddings().weight.copy_(new)
    student.config.pad_token_id = tokenizer.pad_token_id
    student.get_input_embeddings().padding_idx = tokenizer.pad_token_id


def _change_width(args: DistillArguments, config: Any) -> None:
    width = args.student_hidden or config.hidden_size
    heads = args.student_heads or config.num_attention_heads
    fix, expected = "Change it, or --student-heads.", f"a multiple of the {heads} attention heads"
    args.check("student_hidden", width % heads == 0, expected, fix, width)
    if getattr(config, "intermediate_size", None) is not None:
        config.intermediate_size = config.intermediate_size * width // config.hidden_size
    config.hidden_size, config.num_attention_heads = width, heads


# --- checkpoints ----------------------------------------------------------------------------------


def load_model(args: DistillArguments, argument: str, dropout: float | None = None) -> Any:
    """Load the model from the folder in an argument, with the head that the recipe needs.

    Raises:
        DataError: there is no such checkpoint, or it lacks weights.
    """
    path = getattr(args, argument)
    config = config_at("distill", argument, path)
    kind = _class_for(args, argument, config)
    set_dropout(config, dropout)
    options = {"config": config, "dtype": torch.float32, **_without_pooler(kind)}
    expected = (
        f"a {kind.__name__} with all weights, as the recipe {args.recipe} needs; tinybert, minilm "
        "and multilingual need no head"
    )
    model, _ = weights_at("distill", argument, path, expected, kind, **options)
    return model


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model and its tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in _READ for path in Path(folder).glob(pattern)}):
        digest.update(f"{path.name} {file_hash(path)} ".encode())
    return digest.hexdigest()


def _class_for(args: DistillArguments, argument: str, config: Any) -> Any:
    """The class of ``fastplm.models`` with which the recipe reads a checkpoint."""
    family = config.model_type
    able = {"distilbert": (*_ENCODERS, *_DECODERS), "electra": ("electra",)}
    families = able.get(args.recipe, _ENCODERS)
    expected = f"a model of the family {' or '.join(families)} for the recipe {args.recipe}"
    got = f"{getattr(args, argument)}, of the family {family}"
    fix = "Choose another checkpoint or recipe."
    args.check(argument, family in families, expected, fix, got, DataError)
    if family in _DECODERS:
        return fastplm.models.GPT2LMHeadModel
    # Its head predicts the next token, not the masked one.
    reads_both = not getattr(config, "is_decoder", False)
    got = f"{getattr(args, argument)}, which reads from left to right"
    expected = "an encoder that reads in both directions"
    args.check(argument, reads_both, expected, fix, got, DataError)
    ending = "Model"
    if args.recipe == "distilbert" or argument == "generator":
        ending = "ForMaskedLM"
    elif args.recipe == "electra":
        ending = "ForPreTraining"
    return getattr(fastplm.models, family.capitalize() + ending)


def _without_pooler(kind: Any) -> dict[str, bool]:
    """The argument that builds a backbone without a pooler, as no recipe would train it."""
    inits = (inspect.signature(base.__init__) for base in kind.__mro__[:-1])
    takes = any("add_pooling_layer" in init.parameters for init in inits)
    return {"add_pooling_layer": False} if takes else {}


def _is_causal(config: Any) -> bool:
    return config.model_type in _DECODERS


def _check_vocabulary(
    args: DistillArguments, argument: str, path: Any, teacher_tokenizer: Any
) -> None:
    theirs = load_tokenizer(path, ())
    same = theirs.get_vocab() == teacher_tokenizer.get_vocab()
    expected = f"the vocabulary of the teacher, of {len(teacher_tokenizer):,} tokens"
    fix = "Choose a model with the same tokenizer; only multilingual distils into another one."
    got = f"{path}, with another one of {len(theirs):,} tokens"
    args.check(argument, same, expected, fix, got, DataError)


def _check_pair(args: DistillArguments, student: Any, teacher: Any) -> None:
    """Check that ``block_size`` fits both models, and the sizes that the recipe compares."""
    ours, theirs = student.config, teacher.config
    (heads, layers, width), (their_heads, their_layers, their_width) = (
        (each.num_attention_heads, each.num_hidden_layers, each.hidden_size)
        for each in (ours, theirs)
    )

    def of_student(setting: str) -> str:
        """The name of the setting that determined this size of the student."""
        return "student" if args.student is not None else setting

    for config in (ours, theirs):
        longest = most_positions(config)
        expected = f"at most {longest}, the positions of student and teacher"
        fits = longest is None or args.block_size <= longest
        args.check("block_size", fits, expected, "Lower it.")
    if args.recipe in ("tinybert", "minilm"):
        expected = f"{their_heads}, as attention is compared head by head"
        fix = "Choose as many heads as the teacher has, or minilm-v2."
        got = f"{heads} attention heads"
        args.check(of_student("student_heads"), heads == their_heads, expected, fix, got)
    if args.recipe == "tinybert":
        expected = f"at most {their_layers}, the layers of the teacher"
        fix = "Choose a smaller student."
        name, got = of_student("student_layers"), f"{layers} layers"
        args.check(name, layers <= their_layers, expected, fix, got)
    if args.recipe == "multilingual":
        expected = f"{their_width}, the width of the teacher's vectors"
        fix = "Choose a student of the teacher's width."
        args.check(of_student("student_hidden"), width == their_width, expected, fix, width)
    if args.teacher_layer is not None:
        expected, there = f"1 to {their_layers}, the layers of the teacher", args.teacher_layer
        args.check("teacher_layer", there <= their_layers, expected, "Lower it.")
    if args.recipe == "minilm-v2":
        parts = args.relation_heads or their_heads
        expected = f"a divisor of both widths, {width} and {their_width}"
        divides = width % parts == 0 == their_width % parts
        args.check("relation_heads", divides, expected, "Choose another number.", parts)
