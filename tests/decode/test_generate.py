"""Prefill and decode steps against a full recompute and against one another (cases P41, P42, P43, P51)."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.decode import generate
from maxlite.decode.generate import NOTHING, BatchShape, Generator, Programs, Speed, padded_length
from maxlite.decode.sampling import build_sampler
from maxlite.model.build import build_model

NEW = 20
SHORT, LONG = [9, 8, 7], [5, 4, 3, 2, 1, 11, 12, 13]


def build_generator(model, params, sampler, rows, length, new, end_ids=()):
    shape = BatchShape(rows, padded_length(length), new)
    return Generator(Programs(model, sampler, end_ids, shape), jax.jit(model.unstack)(params))


def ids_of(generator, prompts):
    """The ids of each prompt's row and whether it ended."""
    drawn = np.concatenate(list(generator.stream(prompts)), axis=1)
    return [(row[row != NOTHING].tolist(), bool((row == NOTHING).any())) for row in drawn][: len(prompts)]


def recomputed_ids(model, params, prompts, new):
    """Greedy ids by running the whole sequence again for every token, without a cache, weights stacked."""
    length = max(map(len, prompts)) + new

    @jax.jit
    def likeliest(params, tokens, count):
        positions = jnp.arange(length)[None]
        hidden = model.apply(params, tokens[None], positions, (positions < count).astype(jnp.int32)).hidden
        return jnp.argmax(model.logits(params, hidden[0, count - 1]))

    rows = [list(prompt) for prompt in prompts]
    for ids in rows:
        for _ in range(new):
            tokens = np.zeros(length, np.int32)
            tokens[: len(ids)] = ids
            ids.append(int(likeliest(params, tokens, len(ids))))
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


@pytest.fixture(scope="module")
def tiny(tiny_config, noisy_params):
    """A tiny model of one layer, its parameters, and the greedy sampler."""
    config = tiny_config("num_decoder_layers=1")
    model = build_model(config.model, config.compute)
    return model, noisy_params(model), build_sampler(config.decode)


@pytest.fixture(scope="module")
def free(tiny):
    """A Generator of three rows that no id ends."""
    return build_generator(*tiny, 3, 16, NEW)


def test_each_row_of_a_batch_equals_that_row_alone(tiny, free):
    prompts, single = [SHORT, LONG, [17]], build_generator(*tiny, 1, 16, NEW)
    together = ids_of(free, prompts)
    assert together == [ids_of(single, [prompt])[0] for prompt in prompts]
    assert [len(ids) for ids, _ in together] == [NEW] * 3


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "num_decoder_layers=3", "attention_pattern=[local,full]", "sliding_window_size=8",
            "rope_type=llama3", "rope_factor=8", "original_max_position_embeddings=16",
        ],
        ["num_decoder_layers=1", "attention_pattern=[local]", "sliding_window_size=1", "logits_via_embedding=false"],
        [
            "attention_pattern=[local,full]", "sliding_window_size=8", "global_head_dim=24", "global_num_kv_heads=1",
            "share_kv_projections=true", "use_v_norm=true", "use_layer_scalar=true",
        ],
    ],
)  # fmt: skip
def test_cached_equals_full_recompute(tiny_config, noisy_params, overrides):
    config = tiny_config(*overrides)
    model = build_model(config.model, config.compute)
    params = noisy_params(model)
    prompts = [[1, 2, 3, 4, 5, 6], [33]]
    found = ids_of(build_generator(model, params, build_sampler(config.decode), 2, 6, NEW), prompts)
    assert [ids for ids, _ in found] == recomputed_ids(model, params, prompts, NEW)


def test_long_prompt_runs_in_chunks(tiny, monkeypatch):
    prompts = [list(range(1, 41)), SHORT, list(range(20, 52))]
    whole = ids_of(build_generator(*tiny, 3, 40, 6), prompts)
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 16)
    assert padded_length(40) == 48
    assert ids_of(build_generator(*tiny, 3, 40, 6), prompts) == whole


@pytest.fixture(scope="module")
def ending(tiny, free):
    """A Generator of three rows that either of two ids ends, one of which LONG draws soon; and that one."""
    (short, _), (long, _) = ids_of(free, [SHORT, LONG])
    end = next(token for token in long[3 : generate.MAX_TOKENS_A_CALL] if token not in [*short, long[0]])
    unused = next(token for token in range(64) if token not in short + long)
    return build_generator(*tiny, 3, 16, NEW, end_ids=(unused, end)), end


def test_any_end_id_stops_its_row_and_no_other(free, ending):
    (short, _), (long, _) = ids_of(free, [SHORT, LONG])
    generator, end = ending
    assert ids_of(generator, [SHORT, LONG]) == [(short, False), (long[: long.index(end)], True)]


def test_end_id_drawn_first_gives_nothing(tiny, free):
    ((first, *_), _), (long, _) = ids_of(free, [SHORT, LONG])
    assert first not in long
    generator = build_generator(*tiny, 3, 16, NEW, end_ids=(first,))
    assert ids_of(generator, [SHORT, LONG]) == [([], True), (long, False)]


def test_stops_when_all_rows_have_ended(free, ending):
    ((ids, _),) = ids_of(free, [LONG])
    generator, end = ending
    generator.speed = Speed()
    # Rows without a prompt count as ended.
    first, second = generator.stream([LONG])
    assert first.ravel().tolist() == [ids[0], NOTHING, NOTHING]
    assert second[0][second[0] != NOTHING].tolist() == ids[1 : ids.index(end)]
    assert (generator.speed.prefill_tokens, generator.speed.decode_tokens) == (8, ids.index(end) - 1)


def test_each_program_compiles_once(tiny, caplog):
    model, params, sampler = tiny
    unstacked = jax.jit(model.unstack)(params)
    with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
        generator = Generator(Programs(model, sampler, (), BatchShape(2, 16, 20)), unstacked)
        for prompts in ([SHORT, LONG], [LONG, SHORT], [SHORT]):
            assert np.concatenate(list(generator.stream(prompts)), axis=1).shape == (2, 20)
    compiled = [record.getMessage().split(" in ")[0] for record in caplog.records if "XLA comp" in record.getMessage()]
    assert compiled == ["Finished XLA compilation of jit(prefill)", "Finished XLA compilation of jit(step)"]
