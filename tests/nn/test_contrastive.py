"""nn.ContrastiveLoss against the matrix of similarities, nn.GradCache against the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fastplm
from fastplm._machine import peak_bytes
from fastplm.nn import ContrastiveLoss, Dropout, GradCache
from fastplm.testing import assert_within_budget

from ..pairwise import pairwise

WIDTH, QUERIES = 48, 13
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dense(
    query,
    document,
    positive=None,
    query_id=None,
    document_id=None,
    *,
    temperature=0.05,
    symmetric=False,
    normalize=True,
):
    """The formula, pair by pair, with the matrix of all similarities."""
    dtype = query.dtype

    def unit(rows):
        wide = rows if dtype is torch.float64 else rows.float()
        return (wide / wide.norm(dim=1, keepdim=True)).to(dtype)

    if normalize:
        query, document = unit(query), unit(document)
    if positive is None:
        positive = torch.arange(len(query))[:, None]
    lists = [[p for p in row if p >= 0] for row in positive.view(len(query), -1).tolist()]

    def find(rows, table, lists, ids):
        ids = list(range(len(table))) if ids is None else ids.tolist()
        first = [ids.index(one) for one in ids]
        similarity = ((rows / temperature).to(dtype) @ table.T).to(
            torch.promote_types(dtype, torch.float32)
        )
        kept = [j for j in range(len(table)) if first[j] == j]
        return [
            similarity[i, kept].logsumexp(0) - similarity[i, [first[p] for p in wanted]].mean()
            for i, wanted in enumerate(lists)
            if wanted
        ]

    loss = torch.stack(find(query, document, lists, document_id)).mean()
    if not symmetric:
        return loss
    reverse = []
    for i, wanted in enumerate(lists):
        if wanted:
            rows = document[wanted]
            reverse.append(torch.stack(find(rows, query, [[i]] * len(wanted), query_id)).mean())
    return (loss + torch.stack(reverse).mean()) / 2


def make(device="cpu", positives="in place", hard=5, copies=False, dtype=torch.float32):
    """Queries, similar documents, and the indices of each query's documents."""
    query = torch.randn(QUERIES, WIDTH)
    document = torch.cat([query + torch.randn_like(query), torch.randn(hard, WIDTH)])
    found = dict(query=query.to(device, dtype), document=document.to(device, dtype))
    count = len(document)
    if positives != "in place":
        several = torch.stack([torch.randperm(count)[:3] for _ in range(QUERIES)])
        several[4, 1:], several[7, 2] = -1, -1
        several[9] = -1  # this document does not count
        found["positive"] = (several[:, 0] if positives == "one" else several).to(device)
    if copies:
        for name, rows in (("query_id", QUERIES), ("document_id", count)):
            found[name] = (torch.randint(0, 2 * rows // 3, (rows,)) * 2**40).to(device)
    return found


def call(backend="auto", **options):
    def loss(**inputs):
        with fastplm.use_backend(backend, "linear_cross_entropy"):
            return ContrastiveLoss(**options)(**inputs)

    return loss


def reference(**options):
    options.pop("logits_budget", None)
    return lambda **inputs: dense(**inputs, **options)


@pairwise(
    backend=("auto", "triton"),
    dtype=DTYPES,
    positives=("in place", "one", "several"),
    copies=(False, True),
    symmetric=(False, True),
    normalize=(True, False),
    logits_budget=(0, None),
)
def test_the_loss_of_all_similarities(
    backend, dtype, positives, copies, symmetric, normalize, logits_budget
):
    temperature = 0.05 if normalize else 3.0
    options = dict(temperature=temperature, symmetric=symmetric, normalize=normalize)
    assert_within_budget(
        call(backend, **options, logits_budget=logits_budget),
        reference(**options),
        make(positives=positives, copies=copies, dtype=dtype),
        wrt=("query", "document"),
    )


def test_of_copies_the_first_stands_for_all():
    inputs = make(hard=0)
    inputs["document"][5] = inputs["document"][2]
    plain = ContrastiveLoss()(**inputs)
    ids = torch.arange(QUERIES)
    assert_close(ContrastiveLoss()(**inputs, document_id=ids), plain)
    ids[5] = 2
    without = ContrastiveLoss()(**inputs, document_id=ids)
    assert without < plain  # now no query has its own document as a negative
    document = inputs["document"].clone().requires_grad_()
    ContrastiveLoss()(inputs["query"], document, document_id=ids).backward()
    assert not document.grad[5].any() and document.grad[2].any()


def test_a_temperature_that_is_learned():
    inputs = make()
    temperature = nn.Parameter(torch.tensor(0.05))
    loss = ContrastiveLoss(temperature)
    assert list(loss.parameters()) == [temperature]
    loss(**inputs).backward()
    step = 1e-6
    double = {name: value.double() for name, value in inputs.items()}
    above, below = (dense(**double, temperature=0.05 + way * step) for way in (1, -1))
    assert_close(temperature.grad.double(), (above - below) / (2 * step), rtol=1e-4, atol=0)


def test_it_compiles_in_one_graph():
    inputs = make(positives="several", copies=True)
    loss = ContrastiveLoss(symmetric=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(compiled(**inputs), loss(**inputs))


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (dict(query=torch.zeros(3)), "`query` got 1 dimensions"),
        (dict(query=torch.zeros(0, WIDTH)), r"`query` got shape \(0, 48\); expected at least one"),
        (dict(document=torch.zeros(13, 7)), "`document` got 7 columns; expected 48"),
        (dict(document=torch.zeros(5, WIDTH)), "`document` got 5 rows; expected at least 13"),
        (dict(document=torch.zeros(13, WIDTH).half()), "`document` got torch.float16"),
        (dict(positive=torch.zeros(4, dtype=torch.int64)), r"`positive` got shape \(4,\)"),
        (dict(positive=torch.zeros(13)), "`positive` got torch.float32"),
        (dict(document_id=torch.zeros(13, dtype=torch.int64)), r"`document_id` got shape \(13,\)"),
        (dict(query_id=[1]), "`query_id` got a list"),
    ),
)
def test_wrong_inputs(change, said):
    with pytest.raises(fastplm.FastplmError, match=f"ContrastiveLoss: {said}"):
        ContrastiveLoss()(**make() | change)


@pytest.mark.parametrize("temperature", (0, -1.0, "1", float("nan")))
def test_wrong_temperatures(temperature):
    with pytest.raises(fastplm.FastplmError, match="ContrastiveLoss: `temperature` got"):
        ContrastiveLoss(temperature)


# --- GradCache ------------------------------------------------------------------------------------

VOCAB, LENGTH = 40, 6


class Encoder(nn.Module):
    """A model with attention and both kinds of dropout: PyTorch's, and fastplm's by counters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.ours, self.stock = Dropout(dropout), nn.Dropout(dropout)
        self.attention = fastplm.nn.FusedAttention(32, 2, dropout=dropout)
        self.output = nn.Linear(32, 16)

    def forward(self, ids, mask=None):
        hidden = self.ours(self.embedding(ids))
        hidden = hidden + self.attention(hidden, key_mask=mask)
        hidden = self.stock(hidden) * mask[:, :, None]
        return self.output(hidden.sum(1) / mask.sum(1, keepdim=True))


def batches(rows=11):
    found = []
    for _ in range(2):
        mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (rows, 1))
        found.append(dict(ids=torch.randint(0, VOCAB, (rows, LENGTH)), mask=mask))
    return found


def gradients(towers, encode, seed=3):
    """(loss, gradients of all parameters) of one step."""
    parameters = list(dict.fromkeys(p for tower in towers for p in tower.parameters()))
    torch.manual_seed(seed)
    queries, documents = batches()
    torch.manual_seed(seed + 1)
    loss = ContrastiveLoss(0.5)(encode(towers[0], queries), encode(towers[1], documents))
    return loss.detach(), torch.autograd.grad(loss, parameters)


def at_once(tower, batch):
    return tower(**batch)


def cached(size):
    return lambda tower, batch: GradCache(tower, size)(**batch)


def kept(size):
    """A step with the same chunks that keeps all activations."""

    def encode(tower, batch):
        ids, mask = (batch[name].split(size) for name in ("ids", "mask"))
        return torch.cat([tower(*chunk) for chunk in zip(ids, mask, strict=True)])

    return encode


@pytest.fixture(params=("shared", "two towers"))
def towers(request):
    def make(dropout):
        first = Encoder(dropout)
        return (first, first if request.param == "shared" else Encoder(dropout))

    return make


@pytest.mark.parametrize("size", (1, 4, 11, 50))
def test_gradients_are_those_of_the_same_chunks_bit_for_bit(towers, size):
    """Dropout is replayed exactly."""
    made = towers(0.1)
    loss, grads = gradients(made, cached(size))
    expected, expected_grads = gradients(made, kept(size))
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, grads, expected_grads))
    assert not torch.equal(loss, gradients(made, cached(size), seed=4)[0])


@pytest.mark.parametrize("size", (1, 4, 11, 50))
def test_without_dropout_gradients_are_those_of_the_whole_batch(towers, size):
    made = towers(0.0)
    loss, grads = gradients(made, cached(size))
    expected, expected_grads = gradients(made, at_once)
    assert_close(loss, expected)
    assert_close(grads, expected_grads)
    assert size < 11 or all(map(torch.equal, grads, expected_grads))


def test_generators_go_on_as_if_nothing_ran_again():
    tower = Encoder(0.1)
    after = []
    for encode in (cached(4), kept(4)):
        gradients((tower, tower), encode)
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_a_scaled_loss_and_accumulated_gradients():
    tower = Encoder(0.1)
    found = []
    for encode in (cached(3), kept(3)):
        tower.zero_grad()
        for seed in (1, 2):
            torch.manual_seed(seed)
            queries, documents = batches()
            (128 * ContrastiveLoss()(encode(tower, queries), encode(tower, documents))).backward()
        found.append([parameter.grad.clone() for parameter in tower.parameters()])
    assert all(map(torch.equal, *found))


def test_a_cached_batch_holds_the_activations_of_one_chunk():
    tower = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)))
    x = torch.randn(512, 64)

    def step(encode):
        return lambda: encode(x).square().sum().backward()

    whole, chunks = (peak_bytes(step(encode), x.device) for encode in (tower, GradCache(tower, 32)))
    assert chunks < whole / 3


def test_wrong_chunks():
    with pytest.raises(fastplm.FastplmError, match="GradCache: `chunk_size` got 0"):
        GradCache(Encoder(0.0), 0)
    encode = GradCache(Encoder(0.0), 4)
    for arguments, said in (((), "no tensor"), ((torch.zeros(3), torch.zeros(4)), "3, 4")):
        with pytest.raises(fastplm.FastplmError, match=f"GradCache: `args, kwargs` got .*{said}"):
            encode(*arguments)
