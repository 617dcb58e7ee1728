"""fastplm's language models in lm-evaluation-harness, as its ``--model fastplm``.

    python -m fastplm.inference.lm_eval run --model fastplm \\
        --model_args pretrained=path/to/gpt2 --tasks blimp
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models import utils as harness
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fastplm.data import load_tokenizer
from fastplm.errors import DataError, UnsupportedError, check
from fastplm.inference._batches import ONLY_IDS, around, begun, progress_bar
from fastplm.inference._checkpoint import head_of, load_model
from fastplm.inference._token_scores import Found, Part, token_scores
from fastplm.inference.score import start_token
from fastplm.models._base import most_positions
from fastplm.models._heads import CausalLM, MaskedLM
from fastplm.run.checkpoint import config_at
from fastplm.run.hub import folder_of
from fastplm.run.settings import BATCH_TOKENS

_WHERE = "lm_eval"
# Requests that are in memory at once; then the harness may keep their answers.
_AT_ONCE = 4096


@register_model("fastplm")
class FastplmLM(TemplateLM):
    """A language model of fastplm in lm-evaluation-harness.

    - A decoder (GPT, GPT-2, a BERT with ``is_decoder``) gives log-likelihoods, and generates.
    - A masked language model (BERT, RoBERTa, ALBERT, ELECTRA's generator) gives the
      pseudo-log-likelihood of a continuation: each of its tokens is masked in turn, and all others
      are read, as those of the context. ``is_greedy`` is whether each one is the most probable.

    Args:
        pretrained: a checkpoint's folder or name on the Hub, or a model of ``fastplm.models``.
        tokenizer: of a model that is given; or a folder, in place of the checkpoint's.
        max_length: the most tokens that the model reads, by default its positions. What is longer
            is cut at the left.
        prefix_token_id: the token before a text without context; by default that of
            ``start_token``, else the end of text. A tokenizer adds no token to a decoder's texts.
        add_bos_token: whether that token stands before a decoder's contexts, too.
        batch_tokens: the most tokens of a batch; a longer text is a batch of its own.
        bf16: whether the weights of a checkpoint are loaded in bf16.
        device: by default a GPU if there is one; without one it is not read.
        batch_size, max_batch_size: the harness gives them; they are not read.

    Raises:
        ArgumentValueError: another kind of model or tokenizer, or a length above the positions.
    """

    eot_token_id: Any = None
    prefix_token_id: Any = None

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        *,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        bf16: bool = False,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, str):
            folder = folder_of(_WHERE, "pretrained", pretrained)
            head = head_of(config_at(_WHERE, "pretrained", folder))
            pretrained = load_model(_WHERE, folder, head, bf16=bf16)
            tokenizer = str(folder) if tokenizer is None else tokenizer
        moves = device is not None and torch.cuda.is_available()
        self.model = (pretrained.to(device) if moves else pretrained).eval()
        self.causal, masked = (isinstance(self.model, kind) for kind in (CausalLM, MaskedLM))
        backbone = getattr(self.model, "base_model", None)
        able = masked or (self.causal and getattr(backbone, "_is_causal", lambda: True)())
        got, fix = f"a {type(self.model).__name__}", "The harness's own --model hf takes others."
        check(able, _WHERE, "pretrained", got, "a decoder or a masked language model", fix)
        own = load_tokenizer(tokenizer, needs=()) if isinstance(tokenizer, str) else tokenizer
        self.tokenizer, self._device, self.batch_tokens = own, self.model.device, batch_tokens
        start = start_token(self.model, own) if prefix_token_id is None else prefix_token_id
        self.eot_token_id = own.eos_token_id
        self.prefix_token_id = self.eot_token_id if start is None else start
        able = self.prefix_token_id is not None and (self.causal or own.mask_token_id is not None)
        check(able, _WHERE, "tokenizer", f"a {type(own).__name__}", "one with a mask, or an end")
        most = most_positions(self.model.config) or max_length or harness.DEFAULT_MAX_LENGTH
        self.max_length = most if max_length is None else max_length
        able, expected = 3 <= self.max_length <= most, f"3 to {most}, the positions of this model"
        check(able, _WHERE, "max_length", max_length, expected, "Choose a number in between.")
        self._begins = [self.prefix_token_id] if add_bos_token and self.causal else []
        self._around: tuple[list[int], list[int]] = [], []
        if masked:  # its texts stand between tokens such as [CLS] and [SEP]
            self._around = around(own)
        self._room = self.max_length - sum(map(len, self._around))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        ids = self.tokenizer(string, add_special_tokens=False, **ONLY_IDS)["input_ids"]
        return begun(self._begins, ids) if add_special_tokens is None else ids

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The (pseudo-)log-likelihood of whole texts; a long one is read in windows."""
        texts = [self.tok_encode(request.args[0], False) for request in requests]
        # The windows put the first token there.
        first = [self.prefix_token_id]
        texts = [ids[1:] if self.causal and ids[:1] == first else ids for ids in texts]
        windows = [
            [*get_rolling_token_windows(ids, self.prefix_token_id, self._room, 1)] for ids in texts
        ]
        flat = [(None, *make_disjoint_window(pair)) for of_text in windows for pair in of_text]
        answers = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        sums = [math.fsum(next(answers)[0] for _ in of_text) for of_text in windows]
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[Found]:
        answers = []
        with progress_bar(len(requests), "log-likelihood", not disable_tqdm, "requests") as bar:
            for start in range(0, len(requests), _AT_ONCE):
                some = requests[start : start + _AT_ONCE]
                parts = [self._part(*ids) for _, *ids in some]
                found = token_scores(self.model, self.tokenizer, parts, self.batch_tokens)
                for (strings, *_), tokens in zip(some, found, strict=True):
                    values, best = zip(*tokens, strict=True)
                    answers.append((math.fsum(values), all(best)))
                    if strings is not None:
                        self.cache_hook.add_partial("loglikelihood", strings, answers[-1])
                bar.update(len(some))
        return answers

    def _part(self, context: list[int], continuation: list[int]) -> Part:
        count, fix = len(continuation), "Leave it out, or take a model of more positions."
        got, expected = f"a continuation of {count} tokens", f"1 to {self._room}"
        check(1 <= count <= self._room, _WHERE, "requests", got, expected, fix, DataError)
        if not self.causal and context == [self.prefix_token_id]:  # which stands for no context
            context = []
        # A decoder does not read the last token.
        ids = (context + continuation)[-self._room - self.causal :]
        end = len(self._around[0]) + len(ids)
        return Part([*self._around[0], *ids, *self._around[1]], end - count, end)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """What a decoder writes after each context; contexts of one length are a batch."""
        got, fix = f"a {type(self.model).__name__}", "Choose tasks without generation."
        check(self.causal, _WHERE, "pretrained", got, "a decoder", fix, UnsupportedError)
        groups: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            room = self.max_length - harness.normalize_gen_kwargs(request.args[1])["max_gen_toks"]
            got, expected = self.max_length - room, f"1 to {self.max_length - 1}"
            check(room > 0, _WHERE, "max_gen_toks", got, expected, "Set it lower.", DataError)
            ids = (self.tok_encode(request.args[0]) or [self.prefix_token_id])[-room:]
            groups.setdefault((repr(request.args[1]), len(ids)), []).append((number, ids))
        answers: dict[int, str] = {}
        with progress_bar(len(requests), "generation", not disable_tqdm, "requests") as bar:
            for (_, length), group in groups.items():
                size = max(1, self.batch_tokens // length)
                for start in range(0, len(group), size):
                    numbers, contexts = zip(*group[start : start + size], strict=True)
                    texts = self._written(contexts, requests[numbers[0]].args[1])
                    for number, text in zip(numbers, texts, strict=True):
                        answers[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(texts))
        return [answers[number] for number in range(len(requests))]

    def _written(self, contexts: Any, given: Any) -> list[str]:
        options: dict[str, Any] = dict(harness.normalize_gen_kwargs(given))
        end, pad = self.eot_token_id, self.tokenizer.pad_token_id
        stops = harness.handle_stop_sequences(options.pop("until"), self.tokenizer.decode(end))
        ids = torch.tensor(contexts, device=self.model.device)
        if not options["do_sample"]:
            options.pop("temperature", None)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.pop("max_gen_toks"),
            stop_strings=[stop for stop in stops if stop],
            tokenizer=self.tokenizer,
            pad_token_id=end if pad is None else pad,
            **options,
        )
        texts = self.tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
        return [harness.postprocess_generated_text(text, stops, None) for text in texts]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
