"""The losses of distillation: for each recipe a model whose ``forward`` computes the loss.

The teacher is a constant. It is not a submodule of these models, so it is not trained, not saved
in checkpoints, and stays in evaluation mode.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastplm import ops
from fastplm.distill.losses import (
    cosine_distance,
    detection_divergence,
    relation_divergence,
    score_distance,
    squared_distance,
)
from fastplm.distill.settings import WEIGHTS
from fastplm.finetune.features import pooled
from fastplm.models import ElectraForJointPreTraining, ElectraJointConfig
from fastplm.models._heads import shifted
from fastplm.models._ragged import (
    RaggedBatch,
    Unpad,
    backbone_unpad,
    encoder_batch,
    slots_of_labels,
    unpadded,
)
from fastplm.nn._rows import IGNORE_INDEX, as_normalizer, labels_at, vocabulary_loss
from fastplm.pretrain.trainer import DETECTION_COUNTS
from fastplm.run.losses import shifts_labels

if TYPE_CHECKING:
    from fastplm.distill.settings import DistillArguments

#: Encoders whose layers are BERT's, those whose outputs alone are read, and decoders.
ENCODERS = ("bert", "roberta", "albert", "electra", "xlm-roberta")
ALL_ENCODERS = (*ENCODERS, "roberta-prelayernorm", "distilbert", "modernbert", "deberta-v2")
DECODERS = ("gpt2",)
#: Losses by name, each with its weight.
Parts = Mapping[str, tuple[float | None, Tensor]]


class Distillation(PreTrainedModel):
    """Base of the recipes: a student, the teacher, and modules that are trained with the student.

    Attributes:
        student: the model that is trained and saved.
        teacher: a model in evaluation mode, without gradients; not a submodule.
    """

    base_model_prefix = "student"
    #: ``forward`` divides its loss by ``num_items_in_batch``. Trainer reads this attribute.
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    #: The families of the models that it reads, and the end of the names of their classes.
    families: ClassVar[tuple[str, ...]] = ENCODERS
    head: ClassVar[str] = "Model"
    #: Whether its batches are those of a pre-training, with labels.
    labelled: ClassVar[bool] = False

    # They have many classes. Without this, mypy assumes tensors.
    student: Any
    teacher: Any

    def __init__(self, student: Any, teacher: Any, args: DistillArguments) -> None:
        super().__init__(copy.deepcopy(student.config))
        self.student = student
        self.settings = args
        constant(self, teacher=teacher)
        self.add_modules()
        self.post_init()

    @property
    def trains_all(self) -> bool:
        """Whether each weight of the student has a gradient."""
        return all(getattr(self.settings, name) != 0 for name in WEIGHTS)

    def constants(self) -> list[Any]:
        """The models that are not trained."""
        return [self.teacher]

    def add_modules(self) -> None:
        """Add the modules that are trained with the student."""

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the student has its weights, and added modules are initialized already."""

    def get_input_embeddings(self) -> nn.Module:
        return self.student.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        sample_index: Tensor | None = None,
        teacher_input_ids: Tensor | None = None,
        teacher_attention_mask: Tensor | None = None,
        num_items_in_batch: int | Tensor = 1,
        num_tokens_in_batch: int | Tensor = 1,
        num_sequences_in_batch: int | Tensor = 1,
    ) -> dict[str, Tensor]:
        """The loss of a ``Batch``, and its parts without their weights, fp32 [].

        The names of the parts end with ``_loss``.
        """
        inputs = (input_ids, attention_mask, labels, masked_positions, sample_index)
        teachers = (teacher_input_ids, teacher_attention_mask)
        counts = (num_items_in_batch, num_tokens_in_batch, num_sequences_in_batch)
        normalizers = (as_normalizer(count, input_ids.device) for count in counts)
        return self.losses(Batch(*inputs, *teachers, *normalizers))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute what ``forward`` returns."""
        raise NotImplementedError


class Batch(NamedTuple):
    """The arguments of ``Distillation.forward``.

    Args:
        input_ids, attention_mask: int64 [B, T], the student's tokens.
        labels, masked_positions: int64 [B, T] and [P], as collators make them; None in recipes
            without labels.
        sample_index: int64 [B], the sample indices, on which random choices depend.
        teacher_input_ids, teacher_attention_mask: int64 [B / 2, T'], the teacher's tokens; None if
            they are those of the student.
        items, tokens, sequences: 0-d, the denominators of means over labels, tokens and sequences:
            their numbers in all batches of a step.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Any
    masked_positions: Tensor | None
    sample_index: Tensor | None
    teacher_input_ids: Any
    teacher_attention_mask: Any
    items: Tensor
    tokens: Tensor
    sequences: Tensor

    @property
    def mask(self) -> Tensor:
        """bool [B, T], True = token."""
        return self.attention_mask.bool()


def constant(owner: nn.Module, **models: nn.Module) -> None:
    """Make models attributes of a module, frozen and in evaluation mode, but not submodules."""
    for name, model in models.items():
        owner.__dict__[name] = model.eval().requires_grad_(False)


def weighted(parts: Parts) -> dict[str, Tensor]:
    """The weighted sum of the losses, and each loss without its weight."""
    total = sum(weight * value for weight, value in parts.values() if weight)
    return {"loss": total, **{name: value for name, (_, value) in parts.items()}}  # type: ignore


# --- distilbert: the vocabulary -------------------------------------------------------------------


class VocabularyDistillation(Distillation):
    """The student learns from labels, the teacher's predictions and its last hidden states.

    ``hard CE(labels) + soft T^2 D(teacher, student) + hidden (1 - cos)``: the first two terms are
    means over the labelled tokens, the last one is a mean over all tokens. Causal models work, too.

    Source: Sanh et al. 2019 (arXiv 1910.01108); Hinton et al. 2015 (arXiv 1503.02531), §2.
    """

    families, head, labelled = (*ALL_ENCODERS, *DECODERS), "ForMaskedLM", True

    def add_modules(self) -> None:
        self.projection = projection(self.student, self.teacher)
        if shifts_labels(self.student):
            self.loss_type = "ForCausalLM"  # Trainer then counts labels as the shifted loss does

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        args: Any = self.settings
        causal = shifts_labels(self.student)
        labels: Any = shifted(batch.labels) if causal else batch.labels
        inputs: dict[str, Any] = {"attention_mask": batch.attention_mask}
        inputs["sample_index"] = batch.sample_index
        slots = None
        if batch.masked_positions is None:
            slots = slots_of_labels(
                labels, inputs, encoder_batch(self.student, inputs), waits=not causal
            )
        positions, targets = labels_at(
            "distill", labels, labels.shape, batch.masked_positions, exact=False, slots=slots
        )
        if causal:
            inputs["use_cache"] = False
            inputs["extra_rows"] = labels != IGNORE_INDEX
        elif not args.hidden_weight:
            inputs["output_rows"] = positions

        def computed(model: Any) -> tuple[Tensor, Tensor]:
            """The last hidden state, and its rows at the labels."""
            outputs = model.base_model(batch.input_ids, **inputs, return_dict=True)
            hidden = outputs.last_hidden_state
            if "output_rows" in inputs:
                return hidden, hidden[:, 0]
            return hidden, ops.gather_rows(hidden.flatten(0, 1), positions)

        def to_vocabulary(model: Any, rows: Tensor) -> tuple[Tensor, nn.Linear]:
            """(the input of the projection to the vocabulary, that projection)."""
            transform, decoder = model._head()
            return rows if transform is None else transform(rows), decoder

        name = "clm_loss" if causal else "mlm_loss"
        hidden, chosen = computed(self.student)
        chosen, decoder = to_vocabulary(self.student, chosen)
        expected: Any = None
        taught: Any = None
        if args.soft_weight or args.hidden_weight:  # only these read the teacher
            with torch.no_grad():
                expected, taught = computed(self.teacher)
        if args.soft_weight:
            with torch.no_grad():
                taught, teacher_decoder = to_vocabulary(self.teacher, taught)
            vocabulary = ops.linear_distillation(
                chosen,
                decoder.weight,
                taught,
                teacher_decoder.weight,
                targets,
                linear_bias=decoder.bias,
                teacher_bias=teacher_decoder.bias,
                temperature=args.temperature,
                divergence=args.divergence,
                distillation_weight=args.soft_weight,
                cross_entropy_weight=args.hard_weight,
                normalizer=batch.items,
                expected_targets=chosen.shape[0],
            )
            parts = {name: vocabulary.cross_entropy, "soft_loss": vocabulary.distillation}
            result = {"loss": vocabulary.loss, **parts}
        else:
            hard = vocabulary_loss(chosen, decoder, targets, batch.items, dense=True)
            result = weighted({name: (args.hard_weight, hard)})
        if args.hidden_weight:
            apart = cosine_distance(self.projection(hidden), expected, batch.mask) / batch.tokens
            result["loss"] = result["loss"] + args.hidden_weight * apart
            result["hidden_loss"] = apart
        return result


def projection(student: Any, teacher: Any) -> nn.Module:
    """A learned map from the student's width to the teacher's; the identity if they are equal."""
    ours, theirs = student.config.hidden_size, teacher.config.hidden_size
    return nn.Identity() if ours == theirs else nn.Linear(ours, theirs, bias=False)


# --- tinybert and minilm: layers ------------------------------------------------------------------


class LayerDistillation(Distillation):
    """Base of recipes that compare layers of student and teacher, not their predictions."""

    #: Whether the recipe also compares hidden states.
    hidden_states = False

    def chosen(self) -> tuple[Sequence[int], Sequence[int]]:
        """The indices of the compared layers of the student and of the teacher, from 0."""
        raise NotImplementedError

    def parts(self, student: LayerOutputs, teacher: LayerOutputs, mask: Tensor | None) -> Parts:
        """{name of a loss: (its weight, its sum over tokens)}."""
        raise NotImplementedError

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        # Both models leave out the same rows.
        ragged, whole = unpadded(batch.attention_mask, None, None)
        unpad = backbone_unpad(ragged, whole, batch.attention_mask)
        inputs = (batch, ragged, unpad, self.hidden_states)
        ours, theirs = self.chosen()
        student = layer_outputs(self.student, ours, *inputs)
        with torch.no_grad():
            teacher = layer_outputs(self.teacher, theirs, *inputs)
        parts = self.parts(student, teacher, None if whole else batch.mask)
        return weighted(
            {name: (weight, part / batch.tokens) for name, (weight, part) in parts.items()}
        )


@dataclass
class LayerOutputs:
    """The tensors of an encoder's layers that a recipe compares.

    Args:
        projected: for each chosen layer its (queries, keys, values), [B, T, W] each.
        hidden_states: [B, T, E] of the embeddings and of every layer; empty if not requested.
    """

    projected: list[tuple[Tensor, Tensor, Tensor]]
    hidden_states: tuple[Tensor, ...]


def layer_outputs(
    model: Any,
    chosen: Sequence[int],
    batch: Batch,
    ragged: RaggedBatch | None,
    unpad: Unpad,
    hidden_states: bool,
) -> LayerOutputs:
    """Run an encoder without its head, and record outputs of the chosen layers by hooks.

    The values of padding that was left out are 0.
    """
    layers = layers_of(model)
    watched = {module for index in chosen for module in projections_of(layers[index])}
    seen: dict[nn.Module, list[Tensor]] = {module: [] for module in watched}

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen[module].append(output)

    hooks = [module.register_forward_hook(note) for module in watched]
    try:
        outputs = model.base_model(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            sample_index=batch.sample_index,
            unpad=unpad,
            output_hidden_states=hidden_states,
            return_dict=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    projected = []
    for index in chosen:
        call = layers[:index].count(layers[index])  # ALBERT runs one layer several times
        found = [seen[module][call] for module in projections_of(layers[index])]
        projected.append(tuple(out if ragged is None else ragged.pad(out) for out in found))
    return LayerOutputs(projected, outputs.hidden_states or ())  # type: ignore[arg-type]


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of an encoder in the order in which they run; ALBERT's several times."""
    encoder = model.base_model.encoder
    if hasattr(encoder, "calls"):
        return [layer for group in encoder.calls() for layer in group.albert_layers]
    return list(encoder.layer)


def projections_of(layer: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The linear layers of the queries, keys and values."""
    attention = getattr(layer.attention, "self", layer.attention)
    return attention.query, attention.key, attention.value


class TinyBert(LayerDistillation):
    """The student learns attention scores and hidden states of several layers, and the embeddings.

    The student's layer m of N learns from the teacher's layer ``round(m L / N)`` of L, counted from
    1. If the widths differ, two learned projections map the student's hidden states and embeddings
    to the teacher's width.

    Source: Jiao et al. 2020 (arXiv 1909.10351), §3.1, without the prediction layer, as in its
    general distillation.
    """

    hidden_states = True

    def add_modules(self) -> None:
        self.projection = projection(self.student, self.teacher)
        self.embedding_projection = projection(self.student, self.teacher)

    def chosen(self) -> tuple[Sequence[int], Sequence[int]]:
        ours, theirs = len(layers_of(self.student)), len(layers_of(self.teacher))
        return range(ours), uniform_layers(ours, theirs)

    def parts(self, student: LayerOutputs, teacher: LayerOutputs, mask: Tensor | None) -> Parts:
        heads = self.student.config.num_attention_heads
        pairs = zip(student.projected, teacher.projected, strict=True)
        attention = [score_distance(ours[:2], theirs[:2], heads, mask) for ours, theirs in pairs]
        first, *states = student.hidden_states
        expected = [teacher.hidden_states[index + 1] for index in self.chosen()[1]]
        pairs_of_states = zip(map(self.projection, states), expected, strict=True)
        hidden = [squared_distance(ours, theirs, mask) for ours, theirs in pairs_of_states]
        first = self.embedding_projection(first)
        embedded = squared_distance(first, teacher.hidden_states[0], mask)
        args = self.settings
        return {
            "attention_loss": (args.attention_weight, torch.stack(attention).sum()),
            "hidden_loss": (args.hidden_weight, torch.stack(hidden).sum()),
            "embedding_loss": (args.hidden_weight, embedded),
        }


class MiniLM(LayerDistillation):
    """The student's last layer learns attention and value relations of the teacher's last layer.

    Modules after the values in the student's last layer get no gradient and keep their weights.

    Source: Wang et al. 2020 (arXiv 2002.10957), §3.1 and §3.2.
    """

    @property
    def trains_all(self) -> bool:
        return False

    def chosen(self) -> tuple[Sequence[int], Sequence[int]]:
        layer = self.settings.teacher_layer or len(layers_of(self.teacher))
        return [len(layers_of(self.student)) - 1], [layer - 1]

    def parts(self, student: LayerOutputs, teacher: LayerOutputs, mask: Tensor | None) -> Parts:
        (query, key, value), (*theirs, their_value) = student.projected[0], teacher.projected[0]
        heads = self.student.config.num_attention_heads
        values = relation_divergence((value, value), (their_value, their_value), heads, mask)
        weight = self.settings.attention_weight
        attention = relation_divergence((query, key), (theirs[0], theirs[1]), heads, mask)
        return {"attention_loss": (weight, attention), "value_relation_loss": (weight, values)}


class MiniLMv2(MiniLM):
    """The student learns query, key and value relations of one teacher layer.

    The number of relation heads may differ from the number of attention heads.

    Source: Wang et al. 2021 (arXiv 2012.15828), §3.
    """

    def parts(self, student: LayerOutputs, teacher: LayerOutputs, mask: Tensor | None) -> Parts:
        heads = self.settings.relation_heads or self.teacher.config.num_attention_heads
        weight: Any = self.settings.attention_weight
        triples = zip(
            "query key value".split(), student.projected[0], teacher.projected[0], strict=True
        )
        losses = {
            f"{name}_relation_loss": relation_divergence((a, a), (b, b), heads, mask)
            for name, a, b in triples
        }
        return {name: (weight / 3, loss) for name, loss in losses.items()}


def uniform_layers(count: int, of: int) -> list[int]:
    """Split ``of`` layers into ``count`` parts; the index, from 0, of the last layer of each."""
    return [round((index + 1) * of / count) - 1 for index in range(count)]


# --- electra: replaced tokens ---------------------------------------------------------------------


class DetectionDistillation(Distillation):
    """A discriminator learns from a larger one, on tokens that a frozen generator replaces.

    ``hard L_Disc + soft T^2 KL(teacher || student) + hidden (1 - cos)``, each a mean over all
    tokens. The KL compares the probabilities of "replaced" and "original", at a temperature T.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, for the data and L_Disc.
    """

    families, head, labelled = ("electra",), "ForPreTraining", True

    def __init__(self, student: Any, teacher: Any, args: DistillArguments, generator: Any) -> None:
        super().__init__(student, teacher, args)
        config = ElectraJointConfig(
            generator=copy.deepcopy(generator.config),
            discriminator=copy.deepcopy(student.config),
            embedding_sharing="none",
            sampling_seed=args.seed,
        )
        with torch.device("meta"):
            joint: Any = ElectraForJointPreTraining(config)
        joint.config.stage = 2  # the generator has no gradient
        constant(self, generator=generator)
        joint.generator, joint.discriminator = generator, student
        self.__dict__["joint"] = joint

    def add_modules(self) -> None:
        self.projection = projection(self.student, self.teacher)

    def constants(self) -> list[Any]:
        return [self.teacher, self.generator]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        seen: list[Any] = []
        hook = self.student.base_model.register_forward_hook(
            lambda module, args, output: seen.append(output)
        )
        try:
            found = self.joint(
                batch.input_ids,
                batch.attention_mask,
                labels=batch.labels,
                masked_positions=batch.masked_positions,
                sample_index=batch.sample_index,
                num_items_in_batch=batch.items,
                num_tokens_in_batch=batch.tokens,
                output_replaced_ids=True,
                unpad=False,  # blocks have no padding
            )
        finally:
            hook.remove()
        hidden = seen[0].last_hidden_state
        with torch.no_grad():
            inputs = {"attention_mask": batch.attention_mask, "unpad": False, "return_dict": True}
            expected = self.teacher.base_model(found.replaced_ids, **inputs).last_hidden_state
            teacher_logits = self.teacher.logits(self.teacher.features(expected))
        logits = self.student.logits(self.student.features(hidden))
        args = self.settings
        soft = detection_divergence(logits, teacher_logits, args.temperature, batch.mask)
        apart = cosine_distance(self.projection(hidden), expected, batch.mask)
        parts = {
            "rtd_loss": (args.hard_weight, found.loss),
            "soft_loss": (args.soft_weight, soft / batch.tokens),
            "hidden_loss": (args.hidden_weight, apart / batch.tokens),
        }
        counts = {name: getattr(found, name) for name in DETECTION_COUNTS}
        return {**weighted(parts), **counts}


# --- multilingual: sentence vectors ---------------------------------------------------------------


class SentenceDistillation(Distillation):
    """The student learns the teacher's vector of a sentence, for the sentence and its translation.

    The teacher reads B / 2 sentences. The student reads the same sentences, in its own tokens, and
    then their translations. The loss is the mean over these B texts, and over the width, of
    ``(student - teacher)^2``. That is half of the paper's sum.

    Source: Reimers and Gurevych 2020 (arXiv 2004.09813), §3.
    """

    families = ALL_ENCODERS

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        pooling, index = self.settings.pooling, batch.sample_index
        if index is not None:  # dropout of a sentence and of its translation must differ
            index = 2 * index + torch.arange(2, device=index.device).repeat_interleave(
                len(index) // 2
            )
        vectors = sentence_vectors(
            self.student, batch.input_ids, batch.attention_mask, pooling, index
        )
        with torch.no_grad():
            expected = sentence_vectors(
                self.teacher, batch.teacher_input_ids, batch.teacher_attention_mask, pooling
            )
        source, translated = vectors.chunk(2)
        sides = {"source_loss": source, "translation_loss": translated}
        apart = {name: squared_distance(side, expected) for name, side in sides.items()}
        return weighted({name: (1.0, loss / batch.sequences) for name, loss in apart.items()})


def sentence_vectors(
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    pooling: str = "mean",
    sample_index: Tensor | None = None,
) -> Tensor:
    """fp32 [B, E]: the mean of the last hidden states of the tokens, or that of the first token.

    Args:
        model: a model whose ``base_model`` is a drop-in encoder.
        input_ids, attention_mask: int64 [B, T].
        pooling: "mean" | "cls".
        sample_index: int64 [B], the sample indices, on which dropout depends.
    """
    inputs: dict[str, Any] = {"attention_mask": attention_mask, "return_dict": True}
    if sample_index is not None:  # models of Transformers do not take this argument
        inputs["sample_index"] = sample_index
    if pooling == "cls":
        inputs["output_rows"] = "first"
    hidden = model.base_model(input_ids, **inputs).last_hidden_state
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return pooled(wide, attention_mask, pooling)


KINDS: Mapping[str, type[Distillation]] = {
    "distilbert": VocabularyDistillation,
    "tinybert": TinyBert,
    "minilm": MiniLM,
    "minilm-v2": MiniLMv2,
    "electra": DetectionDistillation,
    "multilingual": SentenceDistillation,
}
