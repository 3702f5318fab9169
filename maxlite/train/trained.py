"""The parameters that train and those that stay, as two trees of the same form with None for what the other has.

jax takes a None for a tree without leaves: gradients, moments and clipping see what trains alone. Where all
parameters train, the first tree is all of them, and the second is empty.
"""

import math
from typing import Any, NamedTuple

import jax

from maxlite.model.build import Model


class Divided(NamedTuple):
    """trained: what gradients are taken of. frozen: what passes through a step as it is."""

    trained: Any
    frozen: Any


def divided(tree: Any, trainable: Any) -> Divided:
    """Divides a tree like the parameters; trainable: the same tree of bools."""
    return Divided(
        trained_part(tree, trainable), jax.tree.map(lambda wanted, leaf: None if wanted else leaf, trainable, tree)
    )


def trained_part(tree: Any, trainable: Any) -> Any:
    """Returns the tree with None in place of what does not train."""
    return jax.tree.map(lambda wanted, leaf: leaf if wanted else None, trainable, tree)


def joined(trained: Any, frozen: Any) -> Any:
    """Returns the tree that was divided."""
    return jax.tree.map(lambda mine, other: other if mine is None else mine, trained, frozen, is_leaf=_is_none)


def active_adapters(model: Model) -> int:
    """Returns how many parameters of adapters a token is multiplied with: of experts those that it is sent to."""
    total = 0
    for product in model.products:
        if product.equipment.adapter is not None:
            copies = model.config.num_experts_per_tok if product.is_experts else 1
            summed = math.prod(product.shape[place] for place in product.summed_dims)
            made = math.prod(product.shape[product.is_experts :]) // summed
            total += product.repeats * copies * product.equipment.adapter.rank * (summed + made)
    return total


def _is_none(node: Any) -> bool:
    return node is None
