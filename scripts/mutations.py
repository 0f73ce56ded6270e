"""Would the tests notice? Deliberate faults, one at a time, each of which some test must catch.

    python scripts/mutations.py                 # all of them, about ten minutes on one core
    python scripts/mutations.py scale window    # those with one of these words in their name

Each fault is a text in one file that becomes another one, in a temporary copy of the tree, and the tests that have to
fail then. The same tests have to pass in the copy before any fault is made. Exits with 1 if a fault survives or its
text is not found exactly once: a missing test, or a stale entry (``tests/test_mutations.py`` looks for the latter).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "results", "*.egg-info", "build", "dist")
LIMIT = 600  # seconds for the tests of one fault: one that makes them hang is caught, too


class Mutation(NamedTuple):
    """A fault: in ``file``, ``old`` becomes ``new``, and one of ``tests`` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # node ids below tests/, separated by blanks

    @property
    def node_ids(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests.split(" ")]


def fault(name: str, file: str, old: str, new: str, tests: str) -> Mutation:
    return Mutation(name, f"hf_kvcache/{file}.py", old, new, tests)


STATE = "test_state_machine.py::test_any_sequence_of_operations"
MUTATIONS = [
    # -- storing
    fault(
        "the first token's scale for all",
        "codecs",
        "scale = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)) / self.limit * unit",
        "scale = x[:, :, :1].abs().amax(-1, keepdim=True).expand(*x.shape[:-1], 1) / self.limit * unit",
        "test_codecs.py::test_b53_scales_are_not_frozen_on_the_first_token",
    ),
    fault(
        "fp8 cast without clamping",
        "codecs",
        "x.clamp_(-self.limit, self.limit).to(self.dtype)",
        "x.to(self.dtype)",
        "test_codecs.py::test_b62_clamped_before_the_cast",
    ),
    fault(
        "int8 truncates instead of rounding",
        "codecs",
        "x.round_().clamp_(-127, 127)",
        "x.trunc_().clamp_(-127, 127)",
        "test_codecs.py::test_round_trip_is_within_half_a_step",
    ),
    fault(
        "key groups over the channels of a token",
        "lowbit",
        "return reduce(x, dim=3, keepdim=True)",
        "return reduce(x, dim=4, keepdim=True)",
        "test_lowbit.py::test_b55_channel_keys_survive_a_bias_that_breaks_token_keys",
    ),
    fault(
        "two bits take the worse grid",
        "lowbit",
        "other = other_error < error",
        "other = other_error > error",
        "test_lowbit.py::test_two_bits_lie_where_the_error_is_smaller",
    ),
    fault(
        "the kernels read each head from the first row",
        "slots",
        "self.starts, self.sizes = slots.start, slots.size",
        "self.starts, self.sizes = slots.start * 0, slots.size",
        "test_cpu_decode.py::test_heads_of_different_lengths",
    ),
    fault(
        "expected attention turns queries on instead of back",
        "policies",
        "query = pool.rope.turn(query, -number)",
        "query = pool.rope.turn(query, number)",
        "test_eviction.py::test_expected_attention_is_its_formula",
    ),
    fault(
        "expected attention scales as most models do",
        "policies",
        ".transpose(-1, -2)) * pool.scaling",
        ".transpose(-1, -2)) * keys.shape[-1] ** -0.5",
        "test_eviction.py::test_expected_attention_scales_scores_as_the_model_does",
    ),
    fault(
        "observed queries are those of the last columns",
        "eviction",
        "observed = real & (real.flip(1).cumsum(1).flip(1) <= wanted[:, None])",
        "observed = torch.arange(queries)[None] >= queries - wanted[:, None]",
        "test_eviction.py::test_pads_after_and_between_tokens_change_nothing",
    ),
    fault(
        "expected attention forgets what earlier queries paid",
        "policies",
        "level = torch.cat([old, typical.expand_as(level)], 3)",
        "level = torch.cat([old * 0, typical.expand_as(level)], 3)",
        "test_eviction.py::test_expected_attention_is_its_formula",
    ),
    fault(
        "files of replaced rows keep their names",
        "disk",
        "        path.unlink()\n",
        "        pass\n",
        "test_placement.py::test_evicting_layers_lie_on_disk_in_files_without_a_name",
    ),
    fault(
        "low-bit steps rounded down",
        "lowbit",
        "(bits + 0xFFFF) & ~0xFFFF",
        "bits & ~0xFFFF",
        "test_lowbit.py::test_round_trip_is_within_half_a_step",
    ),
    fault(
        "low-bit zero points left out of the scores",
        "lowbit",
        "out.add_(folded @ zero.transpose(-1, -2))",
        "out.add_(0.0)",
        "test_lowbit.py::test_folded_attention_equals_decoding_first",
    ),
    fault(
        "query not rotated for rotated keys",
        "lowbit",
        "rows, query = query.shape[2], turn(query, self.rotated)",
        "rows = query.shape[2]",
        "test_lowbit.py::test_folded_attention_equals_decoding_first",
    ),
    fault(
        "output not rotated back",
        "lowbit",
        "return turn(torch.cat(pieces, -1), self.rotated, back=True)",
        "return torch.cat(pieces, -1)",
        "test_lowbit.py::test_folded_attention_equals_decoding_first",
    ),
    fault(
        "8-bit values mixed without their scales",
        "codecs",
        "weighted = probs * self.unit_scale(state).transpose(-1, -2)",
        "weighted = probs",
        "test_codecs.py::test_scores_and_mix_equal_decode_then_matmul",
    ),
    fault(
        "tokens that are plain for now not checked for NaN",
        "layers",
        "if run is self.tail:  # plain now",
        "if False:  # plain now",
        "test_cpu_decode.py::test_what_is_not_finite_is_refused_and_nothing_written",
    ),
    # -- layers
    fault(
        "scales not reordered",
        "store",
        "self.state, self.shared = map_state(self.state, fn), False",
        "self.state, self.shared = type(self.state)(fn(self.state[0]), *self.state[1:]), False",
        "test_layers.py::test_b12_reorder_reaches_packed_part",
    ),
    fault(
        "codes reordered, but not the plain tail",
        "layers",
        "                    slab.select_rows(fn)",
        "                    run is self.tail or slab.select_rows(fn)",
        f"{STATE}[int8(residual=5)-sdpa]",
    ),
    fault(
        "mask sizes off by one",
        "layers",
        "slots, total = self._layout(query_length).slots, self.seen + query_length",
        "slots, total = self._layout(query_length).slots + 1, self.seen + query_length",
        "test_layers.py::test_b25_mask_sizes_are_what_update_returns",
    ),
    fault(
        "window off by one",
        "layers",
        "torch.minimum(until, number + self.window)",
        "torch.minimum(until, number + self.window + 1)",
        "test_caches.py::test_sink_window_is_exact",
    ),
    fault(
        "sinks not counted in the ring",
        "layers",
        "* storage.group + pinned",
        "* storage.group",
        "test_layers.py::test_update_hands_out_what_its_queries_attend_to",
    ),
    fault(
        "a token sealed in mid-chunk counts twice",
        "layers",
        "until = torch.where(number < self.apart, until, self.sealed_since(number))",
        "pass",
        "test_lowbit.py::test_every_schedule_gives_the_same_logits",
    ),
    fault(
        "reset keeps the counter",
        "layers",
        "        self.seen = 0\n",
        '        self.seen = getattr(self, "seen", 0)\n',
        "test_layers.py::test_b20_reset_equals_a_new_layer",
    ),
    fault(
        "crop leaves sealed tokens behind",
        "layers",
        "self.sealed.truncate(max(self.boundary(left) - self.apart, 0))",
        "pass",
        "test_layers.py::test_b17_crop",
    ),
    fault(
        "crop past an eviction goes through",
        "layers",
        "        if evicted:\n",
        "        if False:\n",
        "test_layers.py::test_crop_before_and_after_an_eviction",
    ),
    fault(
        "crop of a position counter forgotten",
        "caches",
        "self._last_positions = [max(last + tokens_to_remove, 0) for last in self._last_positions]",
        "pass",
        "test_caches.py::test_b31_rolling_back_one_token_is_the_way_out",
    ),
    fault(
        "a prompt fed twice goes through",
        "caches",
        "again = max(lasts) > 0 and ",
        "again = False and ",
        "test_caches.py::test_b31_a_prompt_that_is_fully_cached",
    ),
    fault(
        "spare rows left out of memory()",
        "store",
        'parts["spare"] += t.untyped_storage().nbytes() - t.nbytes',
        "pass",
        "test_caches.py::test_nbytes_is_every_reachable_byte",
    ),
    # -- sharing
    fault(
        "forks share a slab without copy on write",
        "store",
        "        self.freeze()\n",
        "        pass\n",
        "test_fork.py::test_forks_of_forks",
    ),
    fault(
        "a ring is written to that a fork holds",
        "store",
        "if self.shared or (self.frozen",
        "if (self.frozen",
        "test_fork.py::test_forks_of_forks",
    ),
    fault(
        "forks share importance slots",
        "eviction",
        "self.kept_slots.fork(), self.tail_slots.fork()",
        "self.kept_slots, self.tail_slots",
        "test_eviction.py::test_forks_and_snapshots_continue_alike",
    ),
    # -- eviction
    fault(
        "recent tokens not protected",
        "eviction",
        " | (position >= end - self.retention.recent)",
        "",
        "test_eviction.py::test_budget_holds_at_every_step",
    ),
    fault(
        "sinks not protected",
        "eviction",
        "always = (position < self.retention.sinks) | ",
        "always = ",
        "test_eviction.py::test_budget_holds_at_every_step",
    ),
    fault(
        "budget enforced in prefill only",
        "eviction",
        "        if slots.used < limit:\n            return slots.append(",
        "        if True:\n            return slots.append(",
        "test_eviction.py::test_budget_holds_at_every_step",
    ),
    fault(
        "recent tokens sealed into groups that may leave",
        "eviction",
        "if storage.group == 1:",
        "if True:",
        "test_eviction.py::test_sinks_and_recent_tokens_stay_beside_sealed_ones",
    ),
    fault(
        "rollback of ragged heads that have evicted",
        "eviction",
        "int(slots.size.min()) if isinstance(slots, Ragged) else self.kept",
        "self.kept",
        "test_eviction.py::test_a_head_that_still_holds_all_does_not_make_a_rollback_exact",
    ),
    fault(
        "pads take slots",
        "eviction",
        "return number.masked_fill(~real, -1)[:, None]",
        "return number[:, None]",
        "test_eviction.py::test_a_padded_row_is_the_row_alone_in_any_schedule",
    ),
    fault(
        "pads give attention mass",
        "eviction",
        "return int(observed.any(0).int().argmax()), observed[:, None, :, None]",
        "return int(observed.any(0).int().argmax()), None",
        "test_eviction.py::test_a_padded_row_is_the_row_alone_in_any_schedule",
    ),
    fault(
        "mass pooled over slots as they lie",
        "policies",
        "order = by_number(number)",
        "order = torch.arange(number.shape[-1]).expand_as(number)",
        "test_eviction.py::test_keeps_what_the_definition_keeps",
    ),
    fault(
        "scores not reordered",
        "slots",
        "self.position, self.score = fn(self.position), fn(self.score)",
        "self.position = fn(self.position)",
        "test_eviction.py::test_b15_row_operations_move_everything",
    ),
    fault(
        "a policy's memory not reordered",
        "eviction",
        "self.memory = {name: fn(t) for name, t in self.memory.items()}",
        "pass",
        "test_eviction.py::test_b15_row_operations_move_everything",
    ),
    fault(
        "attention mass does not add up",
        "policies",
        "dtype=torch.float32)) + pool.mass",
        "dtype=torch.float32))",
        "test_eviction.py::test_keeps_what_the_definition_keeps",
    ),
    fault(
        "mass of a KV head not averaged over its query heads",
        "reference",
        "mass += probs.sum(2) * (probs.shape[1] / query.shape[1])\n    out:",
        "mass += probs.sum(2)\n    out:",
        "test_eviction.py::test_keeps_what_the_definition_keeps",
    ),
    # -- attention
    fault(
        "softmax without its scale",
        "reference",
        "(q.float() * scaling)",
        "q.float()",
        "test_attention.py::test_odd_lengths",
    ),
    fault(
        "softcap ignored",
        "reference",
        "if train else scores.div_(softcap).tanh_().mul_(softcap)",
        "if train else scores",
        "test_attention.py::test_softcap_and_learned_sinks",
    ),
    fault(
        "learned sinks ignored",
        "reference",
        "total = by_head.sum(-1, keepdim=True) + (aux - peak).exp()",
        "total = by_head.sum(-1, keepdim=True)",
        "test_attention.py::test_softcap_and_learned_sinks",
    ),
    fault(
        "fully masked rows give NaN",
        "reference",
        "probs = probs.masked_fill(hidden, 0.0) if train else probs.masked_fill_(hidden, 0.0)",
        "pass",
        "test_attention.py::test_fully_hidden_rows_give_zeros",
    ),
    fault(
        "sinks not moved by reposition",
        "view",
        "return (p.clamp_max(self.edge) - p).to(device)",
        "return (p - p).to(device)",
        "test_eviction.py::test_b112_reposition_equals_a_fresh_window",
    ),
    # -- plans and flash kernels
    fault(
        "causality dropped where there is no mask",
        "plan",
        "return (seen & (self.number[:, None] <= p))[:, None]",
        "return seen[:, None]",
        "test_plan.py::test_segments_are_the_rules_and_cover_each_pair_once",
    ),
    fault(
        "segments look ahead",
        "plan",
        "FOREVER, np.maximum(since, number))",
        "FOREVER, since)",
        "test_plan.py::test_segments_are_the_rules_and_cover_each_pair_once",
    ),
    fault(
        "columns of a mask shifted by one",
        "plan",
        "column = self.column - max(self.total - mask.shape[-1], 0)",
        "column = self.column - max(self.total - mask.shape[-1], 0) - 1",
        "test_plan.py::test_a_mask_speaks_of_tokens_wherever_they_lie test_masks.py::"
        "test_a_hole_is_a_hole_while_nothing_is_dropped",
    ),
    fault(
        "halves of the queries overlap",
        "plan",
        "halve(middle, b, rest)",
        "halve(middle - 1, b, rest)",
        "test_plan.py::test_segments_are_the_rules_and_cover_each_pair_once",
    ),
    fault(
        "siblings of a tree taken for pads",
        "plan",
        "pads = bool((seen_ == (causal_ & real[:, None, None, :])).all())",
        "pads = True",
        "test_plan.py::test_what_a_mask_says",
    ),
    fault(
        "weights of a merge swapped",
        "flash",
        "share = torch.sigmoid(lse - level)",
        "share = torch.sigmoid(level - lse)",
        "test_flash.py::test_segments_equal_the_definition",
    ),
    fault(
        "queries that see nothing not cleared",
        "flash",
        "    if dead is None:\n        return out, lse",
        "    if True:\n        return out, lse",
        "test_flash.py::test_segments_equal_the_definition",
    ),
    fault(
        "no segment for sinks that were learned",
        "flash",
        "        if s_aux is not None:\n",
        "        if False:\n",
        "test_flash.py::test_segments_equal_the_definition",
    ),
    fault(
        "a softcap left out of segments",
        "flash",
        "kernel = compat.flash_with_lse(q.device) if softcap is None else None",
        "kernel = compat.flash_with_lse(q.device)",
        "test_flash.py::test_segments_equal_the_definition",
    ),
    fault(
        "segments that look alike lie side by side",
        "plan",
        "step = last.step or far",
        "step = last.step or segment.stop - segment.start",
        "test_plan.py::test_segments_are_the_rules_and_cover_each_pair_once",
    ),
    fault(
        "windows of keys do not move with those of queries",
        "flash",
        "there = Window(first, last - first, piece.shift, piece.times)",
        "there = Window(first, last - first, 0, piece.times)",
        "test_flash.py::test_segments_equal_the_definition",
    ),
    # -- far tiers
    fault(
        "staging buffers of keys and values swapped",
        "placement",
        "for target, source in copies:",
        "for target, source in zip([t for t, _ in copies], [s for _, s in copies][::-1]):",
        "test_placement.py::test_attention_sees_the_same_bits",
    ),
    fault(
        "a copy on the device stays when rows are reordered",
        "placement",
        "        self.home.discard()\n        self.home.lane.drain()\n        self.rows.rearrange(fn)",
        "        self.rows.rearrange(fn)",
        f"{STATE}[int8+staged-sdpa]",
    ),
    fault(
        "hot tokens left out of the copy on the device",
        "placement",
        "if not self.hot or self.rows is None:",
        "if True:",
        f"{STATE}[int4(group=4,residual=4,sinks=2)+staged(keep_recent=6)-kvcache]",
    ),
    # -- files and prefixes
    fault(
        "tensors loaded without their checksum",
        "snapshot",
        "if zlib.crc32(room) != sums[name]:",
        "if False:",
        "test_snapshot.py::test_any_flipped_bit_is_noticed",
    ),
    fault(
        "another model's snapshot is loaded",
        "snapshot",
        "if saved == mine:",
        "if True:",
        "test_snapshot.py::test_another_model_is_refused",
    ),
    fault(
        "namespace ignored in PrefixStore",
        "prefix",
        "return Key(*pair, namespace, extra),",
        'return Key(*pair, "", extra),',
        "test_prefix.py::test_keys_bind_everything",
    ),
    fault(
        "keys not compared when hashes collide",
        "prefix",
        "if entry.key != key or not fits(entry.cache, source):",
        "if not fits(entry.cache, source):",
        "test_prefix.py::test_keys_bind_everything",
    ),
    fault(
        "prefix tokens not compared",
        "prefix",
        "usable = min(shared(entry.tokens, ids), most, entry.rotated.usable(regime))",
        "usable = min(len(entry.tokens), most, entry.rotated.usable(regime))",
        "test_prefix.py::test_tokens_are_compared_when_hashes_collide",
    ),
    # -- whose states
    fault(
        "weights of a model not read",
        "identity",
        "{weights(root(source))}",
        "weights",
        "test_identity.py::test_generate_with_prefix_after_a_change",
    ),
    fault(
        "adapters switched unseen",
        "identity",
        "if (facts := _switches(module))]",
        "if (facts := {})]",
        "test_identity.py::test_switching_back_finds_the_old_states",
    ),
    fault(
        "weights changed after a cache was fed",
        "identity",
        "if now is not None and now != cache._made:",
        "if False:",
        "test_identity.py::test_a_cache_of_weights_that_are_gone_is_not_kept",
    ),
    fault(
        "a second model on a known config unseen",
        "identity",
        '_models.pop(id(vars(module).get("config")), None)',
        "pass",
        "test_identity.py::test_models_that_share_a_config_have_to_be_named",
    ),
    fault(
        "the length's regime ignored in match",
        "prefix",
        "most, entry.rotated.usable(regime))",
        "most)",
        "test_regime.py::test_match_by_hand",
    ),
    fault(
        "the length's regime ignored in a prefill",
        "prefix",
        "if regimes.agree(end, length)), last]",
        "), last]",
        "test_regime.py::test_any_order_of_lengths_is_as_cold",
    ),
    fault(
        "the length's regime ignored in rewind",
        "prefix",
        ", cache._rotated.usable(cache._regimes.of(len(new))))",
        ")",
        "test_regime.py::test_rewind_resets_where_the_regime_changes",
    ),
    fault(
        "an entry replaced by one of another regime",
        "prefix",
        "and entry.rotated.usable(old.rotated.regime) >= old.rotated.length",
        "",
        "test_regime.py::test_a_longer_entry_does_not_replace_one_of_another_regime",
    ),
]


class Stale(Exception):
    """The text of a fault is not there exactly once."""


def mutated(mutation: Mutation, tree: Path = TREE) -> str:
    """The file's text with the fault in it."""
    text = (tree / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise Stale(f"{mutation.name}: found {text.count(mutation.old)} times in {mutation.file}: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def run_tests(tree: Path, node_ids: list[str]) -> int:
    """pytest's exit status in a copy of the tree: 0 passed, 1 failed."""
    # No compiled bytecode: a file that changes within a second at the same size would pass for its old self.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *node_ids]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 1
    if done.returncode > 1:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def outcome(mutation: Mutation, tree: Path) -> str:
    """ "caught", "survived" or "error"; the copy is as it was afterwards."""
    file = tree / mutation.file
    sound = file.read_text()
    try:
        file.write_text(mutated(mutation, tree))
        return {0: "survived", 1: "caught"}.get(run_tests(tree, mutation.node_ids), "error")
    finally:
        file.write_text(sound)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only faults with one of these words in their name")
    words = parser.parse_args(argv).words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        parser.error(f"no fault has {' or '.join(map(repr, words))} in its name")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(TREE, tree, ignore=LEFT_OUT)
        if run_tests(tree, sorted({test for mutation in chosen for test in mutation.node_ids})):
            print("these tests fail without any fault", file=sys.stderr)
            return 1
        counts: dict[str, int] = {}
        for mutation in chosen:
            start = time.monotonic()
            try:
                found = outcome(mutation, tree)
            except Stale as error:
                print(error, file=sys.stderr)
                found = "error"
            counts[found] = counts.get(found, 0) + 1
            print(f"{found:9} {time.monotonic() - start:5.0f} s  {mutation.name} ({mutation.file})", flush=True)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return int(set(counts) != {"caught"})


if __name__ == "__main__":
    sys.exit(main())
