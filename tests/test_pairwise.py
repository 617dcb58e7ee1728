from __future__ import annotations

import itertools

import pytest

from .pairwise import pairwise, table


@pytest.mark.parametrize("strength", (1, 2, 3))
@pytest.mark.parametrize("sizes", ((1,), (3, 2), (3, 2, 4, 4), (5, 3, 3, 2), (4, 1, 3)))
def test_every_combination_of_so_many_columns_is_there(sizes, strength):
    rows = table(sizes, strength)
    assert len(set(rows)) == len(rows) and rows == table(sizes, strength)
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        seen = {tuple(row[column] for column in columns) for row in rows}
        assert seen == set(itertools.product(*(range(sizes[column]) for column in columns)))


def test_a_table_is_much_smaller_than_the_product():
    assert len(table((3, 2, 4, 4))) <= 18
    assert len(table((3, 2, 3, 4))) <= 14
    assert len(table((3, 2, 4, 4), strength=3)) <= 56


def test_the_marks_hold_names_and_values():
    mark = pairwise(size=(1, 2), kind={"long": 9, "short": 3}).mark
    names, cases = mark.args
    assert names == ("size", "kind")
    assert {case.id: case.values for case in cases} == {
        "1-long": (1, 9),
        "1-short": (1, 3),
        "2-long": (2, 9),
        "2-short": (2, 3),
    }
