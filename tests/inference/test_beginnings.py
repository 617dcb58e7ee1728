"""One token stands before a text: whether the tokenizer writes it, the command, or both would."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tokenizers import processors

from fastplm.cli import main
from fastplm.inference.minimal_pairs import minimal_pairs
from fastplm.inference.prompt import Prompt, score_labels
from fastplm.inference.score import log_likelihood, start_token

from .conftest import rows_of, saved

TEXTS = ["the lazy foxes jump", "a", "", "dogs over dogs"]
PAIRS = [("the dogs jump", "the dogs jumps"), ("a fox", "foxes")]
#: What a tokenizer writes around a text, with its first and its last token.
WRITTEN = {"none": "$A", "first": "{0} $A", "last": "$A {1}", "both": "{0} $A {1}"}
#: A decoder, the roles of the tokens around its texts, and whether its configuration names the
#: last one as the one that it knows before a text.
DECODERS = {
    "GPT2LMHeadModel": ("bos", "eos", False),
    "GPT2LMHeadModel that knows the end": ("bos", "eos", True),
    "BertLMHeadModel": ("cls", "sep", False),
}


def writing(tokenizer, written, *roles):
    """A copy of a tokenizer that writes its tokens of two roles as ``WRITTEN`` says."""
    tokenizer = copy.deepcopy(tokenizer)
    tokens = [getattr(tokenizer, f"{role}_token") for role in roles]
    template = WRITTEN[written].format(*tokens)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        template, special_tokens=ids
    )
    return tokenizer


@pytest.fixture
def rows():
    """A function that calls another one, and gives the rows of ids that the model reads in it."""

    def rows(model, call, name="input_ids"):
        found = []

        def keep(module, args, kwargs):
            mask = kwargs.get("attention_mask")
            for place, row in enumerate(kwargs[name]):
                found.append(row[: int(mask[place].sum())] if mask is not None else row)

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)
        result = call()
        handle.remove()
        return [row.tolist() for row in found], result

    return rows


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_reads_one_token_before_a_text(name, written, made, rows):
    first, last, knows_end = DECODERS[name]
    model, _, given = made(name.split()[0])
    model.config.bos_token_id = given.eos_token_id if knows_end else given.bos_token_id
    tokenizer = writing(given, written, first, last)
    start, end = start_token(model, tokenizer), getattr(tokenizer, f"{last}_token_id")
    assert (start == end) == knows_end
    plain = writing(given, "none", first, last)

    def both(call):
        return rows(model, lambda: call(tokenizer)), rows(model, lambda: call(plain))

    # Scores: what the tokenizer writes at the end is scored, as without --bos.
    (read, scores), _ = both(lambda its: log_likelihood(model, its, TEXTS, bos=True))
    ends = written in ("last", "both")
    for score, text in zip(scores, TEXTS, strict=True):
        ids = plain(text)["input_ids"] + [end] * ends
        assert score.tokens == plain.convert_ids_to_tokens(ids)
    assert all(row[0] == start and start not in row[1:] for row in read)
    (alone,) = log_likelihood(model, plain, ["a fox"], bos=True)
    (again,) = log_likelihood(model, tokenizer, ["a fox"], bos=True)
    torch.testing.assert_close(alone.log_probs, again.log_probs[: len(alone.log_probs)])
    # A text that has the token itself.
    begins = plain.convert_ids_to_tokens(start) + "a fox"
    (given_there,) = log_likelihood(model, tokenizer, [begins], bos=True)
    assert torch.equal(given_there.log_probs, again.log_probs)
    # Minimal pairs, which have no other token around them.
    (read, pairs), (_, others) = both(lambda its: minimal_pairs(model, its, PAIRS))
    assert all(row[0] == start and start not in row[1:] for row in read)
    assert torch.equal(pairs.good, others.good) and torch.equal(pairs.bad, others.bad)
    # A prompt, which goes on with the word. Of these decoders it takes GPTs alone.
    if first == "cls":
        return
    prompt = Prompt("{text} {label}", {"one": ["dogs"], "two": ["fox"]})
    (read, _), _ = both(lambda its: score_labels(model, its, prompt, [(text,) for text in TEXTS]))
    assert all(row.count(start) <= 1 and start not in row[1:] for row in read)
    if written in ("first", "both"):
        assert all(row[0] == start for row in read)
    assert knows_end or all(end not in row for row in read)


@pytest.mark.parametrize("written", WRITTEN)
def test_a_decoder_of_two_models_begins_once(written, made, rows):
    model, _, given = made("EncoderDecoderModel")
    tokenizer = writing(given, written, "cls", "sep")
    read, scores = rows(
        model,
        lambda: log_likelihood(model, tokenizer, TEXTS, sources=["a fox"] * len(TEXTS)),
        "decoder_input_ids",
    )
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert all(row[0] == start and start not in row[1:] for row in read)
    for score, text in zip(scores, TEXTS, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [end] * (written in ("last", "both"))
        assert score.tokens == tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("written", WRITTEN)
def test_the_command(written, made, tmp_path, capsys):
    model, _, given = made("GPT2LMHeadModel")
    model.config.bos_token_id = given.bos_token_id
    tokenizer = writing(given, written, "bos", "eos")
    # A class of which Transformers obeys the file.
    names = {name: getattr(given, name) for name in ("bos_token", "eos_token", "pad_token")}
    backend = tokenizer.backend_tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    folder, data = saved(tmp_path / "model", model, tokenizer), tmp_path / "data.txt"
    data.write_text("the lazy foxes jump\n")
    words = ["score", "--model", str(folder), "--data", str(data), "--bos", "--by", "token"]
    assert main(words) == 0
    tokens = [row["token"] for row in rows_of(capsys.readouterr().out)]
    ids = tokenizer("the lazy foxes jump", add_special_tokens=False)["input_ids"]
    ends = [tokenizer.eos_token] * (written in ("last", "both"))
    assert tokens == tokenizer.convert_ids_to_tokens(ids) + ends
