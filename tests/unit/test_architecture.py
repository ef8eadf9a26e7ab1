"""Rules of the architecture that no other tool holds: who may ask for the exchange, names once."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from pathlib import Path

import pytest

from distributed_training.exchange.base import Exchange
from distributed_training.exchange.hivemind import HivemindRounds
from distributed_training.exchange.store_rounds import StoreRounds

PRODUCT = Path(__file__).parents[2] / "distributed_training"
TREES = {
    str(path.relative_to(PRODUCT)): ast.parse(path.read_text()) for path in PRODUCT.rglob("*.py")
}
#: Who may ask which exchange a network has, and why.
MAY_ASK = {
    "exchange/": "it is the exchange",
    "validator/average.py": "it takes part in the all-reduce",
    "network.py": "defaults of a network's file",
    "config/": "checks of settings, and what they mean for others",
    "founding.py": "founding",
    "signing.py": "founding",
    "founder.py": "founding",
    "localnet/": "founding, on one machine",
    "plan_command.py": "founding: what a network would take",
    "doctor.py": "checks",
    "health/": "checks",
    "training/outer_rule.py": "a check: a rule that merges uploads has none over hivemind",
}


def test_nothing_else_asks_for_the_exchange() -> None:
    asked = {
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if not name.startswith(tuple(MAY_ASK))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("exchange", "averages")
        # An object of one's own is no question about the network.
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert asked == set()


@pytest.mark.parametrize("exchange", [StoreRounds, HivemindRounds])
def test_an_exchange_has_the_four_methods_of_its_interface(exchange: type) -> None:
    methods = {name for name in vars(Exchange) if not name.startswith("_")}
    assert methods == {"start", "send", "applied", "stop"}
    for name in methods:
        wanted, found = (inspect.signature(getattr(one, name)) for one in (Exchange, exchange))
        assert wanted == found, name


def test_each_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
