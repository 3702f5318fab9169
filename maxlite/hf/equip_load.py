"""Parameters of a model whose kernels are stored in few bits or have adapters, from a source that has them otherwise.

Float kernels are rounded to nearest as they come, one stacked kernel at a time, and adapters that a source lacks
begin anew. What is stored in few bits is taken as it is, and by a model that stores it so alone.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.sharding import Sharding

from maxlite.checkpoint.tree import ArrayShape, leaf_paths
from maxlite.errors import CheckpointError
from maxlite.hf.kernels import KERNEL, stacked_dims
from maxlite.model.build import Model, Params
from maxlite.model.equip import ADAPTER_NAMES, Product
from maxlite.nn.equipment import StoredForm
from maxlite.ops.stored import quantize_kernel, stored_type

CODES, SCALE = "/codes", "/scale"


class Intake:
    """What to read for a model, and what becomes of it.

    wanted: path -> shape, dtype and sharding of each array to be read, in the order of its tree.
    rounded: path of a kernel to be read -> the product that stores it in few bits.
    """

    def __init__(self, model: Model, shardings: Params, saved: Mapping[str, ArrayShape] | None):
        """saved: what a checkpoint has; None stands for a float model without adapters."""
        self._model, self._shardings = model, leaf_paths(shardings)
        kernels = {product.params_path + KERNEL: product for product in model.products if product.equipment.stored}
        self.rounded = {path: product for path, product in kernels.items() if saved is None or path in saved}
        self.is_fresh = not any(is_adapter(path) for path in saved or ())
        replaced = {product.params_path + name for product in self.rounded.values() for name in (CODES, SCALE)}
        self.wanted = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._shardings[path])
            for path, leaf in leaf_paths(model.abstract_params).items()
            if path not in replaced and not (self.is_fresh and is_adapter(path))
        }
        for path, product in self.rounded.items():
            # All the bits there are; and cut over devices as the codes, whose dimensions are the kernel's.
            shape, sharding = (product.repeats, *product.shape), self._shardings[product.params_path + CODES]
            self.wanted[path] = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def take(self, path: str, array: jax.Array) -> Iterator[tuple[str, jax.Array]]:
        """Yields path and value of what an array that was read becomes."""
        if path not in self.rounded:
            yield path, array
            return
        product = self.rounded[path]
        paths = [product.params_path + name for name in (CODES, SCALE)]
        codes, scale = self._shardings[paths[0]], self._shardings[paths[1]]
        form = product.equipment.stored
        assert form is not None, "kernels of these products are stored"
        made = _build_rounding(stacked_dims(product), form, (codes, scale))(array)
        # So that no more kernels than one are there as floats.
        yield from zip(paths, jax.block_until_ready(made), strict=True)

    def complete(self, found: dict[str, jax.Array], seed: int) -> Params:
        """Returns the parameters from what `take` gave; seed: of adapters that begin anew."""
        missing = [path for path in leaf_paths(self._model.abstract_params) if path not in found]
        found = found | self._fresh(missing, seed)
        structure = jax.tree.structure(self._model.abstract_params)
        return jax.tree.unflatten(structure, [found[path] for path in leaf_paths(self._model.abstract_params)])

    def _fresh(self, paths: list[str], seed: int) -> dict[str, jax.Array]:
        if not paths:
            return {}
        assert all(is_adapter(path) for path in paths), paths

        def init(key: jax.Array) -> dict[str, jax.Array]:
            # The compiler drops what makes the others.
            made = leaf_paths(self._model.init(key))
            return {path: made[path] for path in paths}

        shardings = {path: self._shardings[path] for path in paths}
        return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))

    def describe(self) -> str | None:
        """Returns a line about what is not as the source has it; None where all is."""
        texts = []
        for form in sorted({product.equipment.stored for product in self.rounded.values()}, key=str):
            assert form is not None, "kernels of these products are stored"
            count = sum(product.equipment.stored == form for product in self.rounded.values())
            texts.append(f"{count} stacked kernels were rounded to {form.qtype}")
        if self.is_fresh and self._model.compute.lora_rank:
            texts.append(f"adapters of rank {self._model.compute.lora_rank} begin anew")
        return "; ".join(texts) or None


def is_adapter(path: str) -> bool:
    """Says whether a parameter is a part of an adapter."""
    return path.rpartition("/")[2] in ADAPTER_NAMES


def check_forms(saved: Mapping[str, ArrayShape], model: Model, path: str | Path) -> None:
    """Makes sure that a model stores kernels as a checkpoint does, where that has them in few bits.

    Raises:
        CheckpointError: it does not, or the checkpoint has adapters and the model none.
    """
    for product in model.products:
        if product.params_path + CODES in saved:
            _check_form(saved, product, path)
    adapters = [name for name in saved if name.endswith(f"/{ADAPTER_NAMES[0]}")]
    if adapters and not model.compute.lora_rank:
        rank = saved[adapters[0]][0][-1]
        raise CheckpointError(
            f"{path} has adapters, as {adapters[0]}, and this config has none: give the lora keys of its config.yml "
            f"(lora_rank={rank}, lora_alpha, lora_module_path). `maxlite convert-hf` merges them into the weights."
        )


def _check_form(saved: Mapping[str, ArrayShape], product: Product, path: str | Path) -> None:
    form, codes = product.equipment.stored, saved[product.params_path + CODES]
    summed, shape = stacked_dims(product), (product.repeats, *product.shape)
    found = stored_type(codes[0], codes[1], shape, summed)
    # Arrays of another model are its shapes' matter.
    if found is None or (form is not None and found == form.qtype):
        return
    wants = "floats" if form is None else form.qtype
    raise CheckpointError(
        f"{path} has its kernels in {found}, as {product.params_path + CODES}, and this config wants {wants}: give the "
        f"weight_quant keys of its config.yml (weight_quantization={found}, weight_quant_tile_size, "
        "weight_quant_module_path), or the parameters of the float model that it was made from."
    )


@functools.lru_cache(maxsize=256)
def _build_rounding(contracted: tuple[int, ...], form: StoredForm, shardings: tuple[Sharding, Sharding]):
    def make(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_kernel(kernel, contracted, form.qtype, form.tile_size)

    return jax.jit(make, out_shardings=shardings)
