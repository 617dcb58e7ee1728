"""tools/hub_kernel.py: what it writes is loaded by `kernels` from a local folder, and used by name.

The release of `kernels` that a Transformers asks for may be out of reach, so its check of versions
is opened; all else is theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hub_kernel

pytest.importorskip("kernels", reason="kernels not installed: pip install kernels")

#: The two repositories by the names under which a model asks for them.
PACKED, PADDED = "fastplm/flash-attn", "fastplm/attention"
HEAD = """
import copy, sys
import transformers.utils.import_utils as utils
utils.is_kernels_available.__wrapped__.__defaults__ = ("0", "99")
import torch, transformers
from pathlib import Path
torch.manual_seed(0)
SIZES = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             intermediate_size=64, pad_token_id=0)
ids = torch.randint(5, 99, (3, 16))
mask = torch.arange(16) < torch.tensor([[10], [16], [7]])
ids = ids.masked_fill(~mask, 0)

def pair(name, config, kernel=PACKED, reference="sdpa", **options):
    kind = getattr(transformers, name)
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation=reference, **options)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation=kernel, **options)
    ours.load_state_dict(theirs.state_dict())
    assert ours.config._attn_implementation == kernel
    return theirs.eval(), ours.eval()

def results(model, rows=None, **inputs):
    model.zero_grad()
    out = model(**inputs)
    out = out.logits if "logits" in out else out.last_hidden_state
    out = out[rows] if rows is not None else out
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

def compare(a, b, least=1e-5):
    assert a[1].keys() == b[1].keys()
    most = max(float(g.abs().max()) for g in a[1].values())
    assert (a[0] - b[0]).abs().max() <= least * a[0].abs().max(), (a[0] - b[0]).abs().max()
    for name, grad in a[1].items():
        assert (grad - b[1][name]).abs().max() <= least * most, name
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, hub_kernel.__file__, str(out)], check=True)
    return out


@pytest.fixture
def run(folder, tmp_path):
    def run(script):
        names = f"PACKED, PADDED = {PACKED!r}, {PADDED!r}"
        text = f"{names}\n{HEAD}\n{textwrap.dedent(script)}"
        both = ":".join(f"{name}={folder / name.split('/')[1]}" for name in (PACKED, PADDED))
        environment = os.environ | {"LOCAL_KERNELS": both, "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, "-W", "error::UserWarning:__main__", "-c", text]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_is_loaded_without_transformers_and_beside_fastplm_and_another_build(folder, tmp_path):
    other = tmp_path / "other"
    texts = hub_kernel.sources("flash-attn")
    for kind in ("cpu", "cuda"):
        path = other / f"build/torch-{kind}"
        hub_kernel.write(path, "flash-attn", texts, "fastplm_other", {"type": kind})
    script = f"""
        import sys, torch
        from pathlib import Path
        from kernels import get_local_kernel
        first = get_local_kernel(Path({str(folder)!r}) / "flash-attn")
        assert not {{"fastplm", "transformers", "tokenizers"}} & sys.modules.keys()
        second = get_local_kernel(Path({str(other)!r}))
        import fastplm.flash_attn
        assert fastplm.__version__ == first.__version__
        found = []
        for module in (first, second, fastplm.flash_attn):
            torch.manual_seed(0)
            q = torch.randn(2, 9, 4, 16, requires_grad=True)
            out = module.flash_attn_func(q, q, q, causal=True, dropout_p=0.1)
            out.square().sum().backward()
            found.append((out, q.grad))
        for one in found[1:]:  # with csrc/ in fastplm, and without it in the two
            torch.testing.assert_close(one, found[0])
        hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(50, 16)
        labels = torch.tensor([3, -100, 7, 0, -100, 49])
        loss = first.linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        plain = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain, hidden)[0])
        assert len({{first.ops, second.ops, fastplm.ops}}) == 3
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_its_triton_kernels_equal_its_reference(folder, tmp_path):
    script = f"""
        import importlib, torch
        from pathlib import Path
        from kernels import get_local_kernel
        kernel = get_local_kernel(Path({str(folder)!r}) / "flash-attn")
        use_backend = importlib.import_module(kernel.__name__ + "._backends").use_backend
        torch.manual_seed(0)
        q = torch.randn(10, 2, 16, requires_grad=True)
        starts = torch.tensor([0, 6, 10], dtype=torch.int32)
        found = []
        for backend in ("triton", "eager"):
            with use_backend(backend):
                packed = (q, q, q, starts, starts, 6, 6)
                out = kernel.flash_attn_varlen_func(*packed, causal=True, window_size=(3, 0))
            found.append((out, *torch.autograd.grad(out.square().sum(), q)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_by_name_equal_their_sdpa_with_gradients(run):
    run("""
        given = dict(input_ids=ids, attention_mask=mask.long())
        fp64 = dict(dtype=torch.float64)
        decoder = dict(num_key_value_heads=2, sliding_window=5)
        for name, config, options in (
            ("BertModel", transformers.BertConfig(**SIZES), {}),
            ("ModernBertModel", transformers.ModernBertConfig(**SIZES, local_attention=4), {}),
            ("MistralForCausalLM", transformers.MistralConfig(**SIZES, **decoder), {}),
            # In fp32 Transformers' wrapper fails before it calls any kernel: docs/dev/hub.md.
            ("GPT2LMHeadModel", transformers.GPT2Config(**SIZES), fp64),
        ):
            pairs = pair(name, config, **options)
            compare(*(results(model, mask, **given) for model in pairs))
    """)


def test_packed_sequences_equal_the_padded_batch(run):
    run("""
        config = transformers.BertConfig(**SIZES)
        _, model = pair("BertModel", config)
        padded = results(model, mask, input_ids=ids, attention_mask=mask.long())
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        packed = collator([{"input_ids": row[seen].tolist()} for row, seen in zip(ids, mask)])
        del packed["labels"]
        compare(padded, results(model, 0, **packed))
    """)


def test_sentence_transformers_leave_padding_out(run):
    run("""
        from sentence_transformers import SentenceTransformer, models as modules
        from transformers import BertTokenizerFast
        words = "[PAD] [UNK] [CLS] [SEP] [MASK] a cat sat on the mat and slept".split()
        Path("vocab.txt").write_text("\\n".join(words))
        BertTokenizerFast("vocab.txt").save_pretrained("model")
        transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained("model")
        texts = ["a cat", "the cat sat on the mat and slept", "sat", "on the mat"]
        found, lengths = [], []
        for name in ("sdpa", PACKED):
            inner = modules.Transformer("model", model_kwargs={"attn_implementation": name})
            model = SentenceTransformer(modules=[inner, modules.Pooling(32)])
            hook = inner.auto_model.embeddings.register_forward_hook(
                lambda module, args, out: lengths.append(out.shape[:-1].numel())
            )
            found.append(torch.tensor(model.encode(texts)))
        torch.testing.assert_close(*found)
        assert lengths == [4 * 10, 4 + 10 + 3 + 5], lengths
    """)


def test_models_with_a_bias_on_the_scores_equal_eager_with_gradients(run):
    """T5 and its kin, whose bias is read back into its table, and one whose bias is not T5's."""
    run("""
        from collections import Counter
        kin = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                   num_decoder_layers=2, relative_attention_num_buckets=8,
                   relative_attention_max_distance=12)
        page = dict(relative_attention_num_buckets=32, image_size=16)
        targets = torch.randint(5, 99, (3, 9))
        given = dict(input_ids=ids, attention_mask=mask.long(), decoder_input_ids=targets)
        short = torch.arange(9) < torch.tensor([[9], [4], [7]])
        calls = Counter()
        for name, config, fused, added in (
            ("T5ForConditionalGeneration", transformers.T5Config(**kin), 4, 0),
            ("MT5Model", transformers.MT5Config(**kin), 4, 0),
            ("UMT5Model", transformers.UMT5Config(**kin), 4, 0),
            ("SwitchTransformersModel", transformers.SwitchTransformersConfig(**kin), 2, 2),
            ("LongT5Model", transformers.LongT5Config(**kin, local_radius=4), 2, 0),
            ("UdopForConditionalGeneration", transformers.UdopConfig(**kin | page), 0, 6),
        ):
            pairs = pair(name, config, PADDED, "eager")
            inner = sys.modules[transformers.AttentionInterface()[PADDED].__module__]
            attention, added_up = inner.ops.attention, inner._sum
            def spied(*tensors, relative_bias, **options):
                calls["fused"] += relative_bias is not None
                return attention(*tensors, relative_bias=relative_bias, **options)
            def spied_sum(*args):
                calls["added"] += 1
                return added_up(*args)
            boxes = dict(bbox=torch.rand(3, 16, 4)) if fused == 0 else {}
            for seen in (None, short):  # causality alone, and beside a mask
                rows = slice(None) if seen is None else seen
                masks = dict(decoder_attention_mask=None if seen is None else seen.long())
                theirs = results(pairs[0], rows, **given, **masks, **boxes)
                inner.ops.attention, inner._sum = spied, spied_sum
                compare(theirs, results(pairs[1], rows, **given, **masks, **boxes))
                inner.ops.attention, inner._sum = attention, added_up
                assert calls == Counter(fused=fused, added=added), (name, calls)
                calls.clear()
    """)


def test_t5_with_a_cache_with_long_texts_compiled_and_exported(run):
    run("""
        kin = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                   decoder_start_token_id=0, eos_token_id=None)
        theirs, ours = pair("T5ForConditionalGeneration", transformers.T5Config(**kin), PADDED)

        def encoder_is_equal(encoder, length):
            seen = mask[:, :length]
            given = dict(input_ids=ids[:, :length].clone(), attention_mask=seen.long())
            both = (one(**given).last_hidden_state[seen] for one in (theirs.encoder, encoder))
            torch.testing.assert_close(*both)

        # Before anything else, as a table that is kept would help.
        given = dict(input_ids=ids, attention_mask=mask.long())
        length = torch.export.Dim("length", min=2, max=400)
        sizes = dict.fromkeys(given, {1: length})
        program = torch.export.export(ours.encoder, (), given, dynamic_shapes=sizes)
        encoder_is_equal(program.module(), 16)
        encoder_is_equal(program.module(), 11)
        for cache in (None, "static"):
            options = dict(max_new_tokens=12, min_new_tokens=12, cache_implementation=cache,
                           output_scores=True, return_dict_in_generate=True)
            wanted, found = (one.generate(**given, **options) for one in (theirs, ours))
            assert wanted.sequences.equal(found.sequences)
            torch.testing.assert_close(wanted.scores, found.scores)
        long = torch.randint(5, 99, (2, 150))  # beyond the largest distance of 128
        given = dict(input_ids=long, decoder_input_ids=long.flip(1))
        compare(*(results(one, **given) for one in (theirs, ours)))
        attention = sys.modules[transformers.AttentionInterface()[PADDED].__module__]
        sys.modules[attention.table_on.__module__]._BUCKET_TABLES.clear()
        stats = torch._dynamo.utils.counters["stats"]
        stats.clear()
        encoder = torch.compile(ours.encoder, fullgraph=True, dynamic=True, backend="aot_eager")
        encoder_is_equal(encoder, 16)
        encoder_is_equal(encoder, 11)
        assert stats["unique_graphs"] == 1, stats
    """)


def test_other_models_by_the_attention_of_a_layer(run):
    """Those that the other kernel cannot serve (docs/dev/hub.md), and grouped heads."""
    run("""
        bart = dict(vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=0,
                    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                    decoder_ffn_dim=64, max_position_embeddings=32)
        given = dict(input_ids=ids, attention_mask=mask.long())
        decoder = dict(num_key_value_heads=2, sliding_window=5)
        for name, config in (
            ("BertModel", transformers.BertConfig(**SIZES)),
            ("GPT2LMHeadModel", transformers.GPT2Config(**SIZES)),
            ("BartModel", transformers.BartConfig(**bart)),
            ("MistralForCausalLM", transformers.MistralConfig(**SIZES, **decoder)),
        ):
            pairs = pair(name, config, PADDED)
            compare(*(results(model, mask, **given) for model in pairs))
            if "LM" in name:
                options = dict(max_new_tokens=4, cache_implementation="static", do_sample=False)
                one, other = (model.generate(ids[1:2], **options) for model in pairs)
                assert one.equal(other) and one.shape == (1, 20), (one, other)
    """)


def test_metadata_and_imports(folder):
    for variant in folder.glob("*/build/*"):
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["name"] == f"fastplm-{variant.parent.parent.name}"
        assert variant.name == f"torch-{metadata['backend']['type']}"
        for path in variant.rglob("*.py"):
            text = path.read_text()
            assert "fastplm_C." not in text and "import fastplm" not in text, path


def test_a_module_that_cannot_be_made_relative_is_an_error():
    with pytest.raises(ValueError, match="a.py: 'import fastplm' is not made relative"):
        hub_kernel.relative(Path("ops/a.py"), "import fastplm\n", "x")
    text = (
        "from fastplm.ops import gelu\nfrom fastplm import _rules\n    from fastplm._b import c\n"
    )
    made = hub_kernel.relative(Path("ops/a.py"), text, "x")
    assert made == "from ..ops import gelu\nfrom .. import _rules\n    from .._b import c\n"
