"""Steps in a process that has trained other models: benchmarks/after_others.py."""

from __future__ import annotations

import after_others


def test_a_family_is_timed_after_other_models(monkeypatch):
    trained = []

    def steps_of(family):
        trained.append(family)
        return {kind: lambda: None for kind in after_others.KINDS}

    monkeypatch.setattr(after_others, "steps_of", steps_of)
    line = after_others.measure("bert", others=2, rounds=3)
    assert trained == ["electra", "gpt2", "bert"]
    assert {"fastplm ms", "fastplm faults", "sdpa ms", "sdpa faults"} <= line.keys()
