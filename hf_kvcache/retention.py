"""Which tokens stay? The rules; ``policies.py`` has the scores of importance eviction, ``eviction.py`` carries it out.

Sink + window is a function of position alone: ``sinks`` first tokens and the last ``window`` tokens stay (StreamingLLM,
Xiao et al., arXiv:2309.17453, section 3.2: the first tokens soak up attention that has to go somewhere; dropping them
breaks the model). The window includes the token itself, as sliding-window layers count it:

    query p attends to token t   iff   t <= p  and  (t < sinks  or  p - t < window)

Kept keys keep the rotation they were stored with. With ``reposition`` sinks seem to lie right before the window, as in
StreamingLLM: a query at p > sinks + window - 1 is rotated back to position sinks + window - 1 for the sinks' scores, so
that no distance is ever larger than those at which the window was full for the first time.

Importance eviction keeps, per row and KV head, at most ``budget`` tokens: the row's first ``sinks`` and last ``recent``
ones, and of the others those that a policy scores highest.
"""

from __future__ import annotations

import math
from typing import Any

from .policies import POLICIES, Policy, find_policy, flag, own_options


class KeepAll:
    """Every token stays."""

    sinks, window, evicts, reposition = 0, None, False, False
    reach: tuple[int, int] | None = None
    policy: Policy | None = None
    spec = "all"


class SinkWindow:
    """The first ``sinks`` and the last ``window`` tokens stay.

    Args:
        reposition: distances to the sinks are cut off at the window's end (needs rotary positions).

    Raises:
        ValueError: ``sinks`` is negative, ``window`` is not at least 1, or either is no integer.
    """

    evicts = True
    policy: Policy | None = None

    def __init__(self, sinks: int = 4, window: int = 1020, reposition: bool = False) -> None:
        _check("sink", ("sinks", sinks, 0), ("window", window, 1))
        self.sinks, self.window, self.reposition = sinks, window, flag("sink", "reposition", reposition)

    @property
    def reach(self) -> tuple[int, int]:
        """The first tokens, and how many of the last, that a query sees."""
        return self.sinks, self.window

    @property
    def spec(self) -> str:
        return f"sink({self.sinks},{self.window}{',reposition=on' if self.reposition else ''})"


class Importance:
    """At most ``budget`` tokens per KV head stay, chosen by a policy.

    Args:
        name: ``random``, ``knorm``, ``keydiff``, ``tova``, ``h2o``, ``snapkv`` or ``expected``.
        budget: tokens per KV head (int), or the share of the tokens seen (float in (0, 1)).
        sinks: first tokens of a row that always stay.
        recent: last tokens of a row that always stay, the newest one included.
        pyramid: lower layers get more, higher ones less, with the same sum (after PyramidKV, Cai et al.,
            arXiv:2406.02069): linear from 1.5 to 0.5 of the budget.
        adaptive: the heads of a layer share their budgets, the tokens that score highest win; every head keeps at
            least a fifth of its share (Ada-KV, Feng et al., arXiv:2407.11550).
        **options: of the policy.

    Raises:
        ValueError: an unknown policy or option, or a budget smaller than what always stays.
    """

    evicts, window, reposition, reach = True, None, False, None

    def __init__(
        self,
        name: str = "snapkv",
        budget: int | float = 1024,
        sinks: int = 4,
        recent: int = 32,
        pyramid: bool = False,
        adaptive: bool = False,
        **options: Any,
    ) -> None:
        self.policy: Policy
        self.policy, self._options = find_policy(name, options)
        _check(name, ("sinks", sinks, 0), ("recent", recent, 1))
        share = isinstance(budget, float)
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or (share and not 0 < budget < 1):
            raise ValueError(f"{name}: budget={budget!r}: an int (tokens per head) or a float in (0, 1) (share kept)")
        if not share and budget < sinks + recent:
            raise ValueError(
                f"{name}: budget={budget} is less than sinks={sinks} and recent={recent} tokens, which always stay: "
                "raise budget, or lower sinks or recent"
            )
        self.name, self.budget, self.sinks, self.recent = name, budget, sinks, recent
        self.pyramid, self.adaptive = flag(name, "pyramid", pyramid), flag(name, "adaptive", adaptive)

    @property
    def spec(self) -> str:
        """The canonical string."""
        given = {"sinks": self.sinks, "recent": self.recent, "pyramid": self.pyramid, "adaptive": self.adaptive}
        defaults = {"sinks": 4, "recent": 32, "pyramid": False, "adaptive": False}
        text = [f"budget={self.budget}"]
        given = {k: v for k, v in given.items() if v != defaults[k]} | self._options
        words = {True: "on", False: "off"}
        text += [f"{k}={words[v] if isinstance(v, bool) else v}" for k, v in given.items()]
        return f"{self.name}({','.join(text)})"

    def for_layer(self, layer: int, layers: int) -> int | float:
        """The budget of one layer."""
        if not self.pyramid or layers < 2:
            return self.budget
        factor = 1.5 - layer / (layers - 1)
        if isinstance(self.budget, float):
            return min(self.budget * factor, 1.0)
        return max(round(self.budget * factor), self.sinks + self.recent)

    def tokens(self, budget: int | float, seen: int) -> int:
        """Tokens per head that stay of ``seen``, under one layer's budget."""
        if isinstance(budget, float):
            budget = max(math.ceil(budget * seen - 1e-9), self.sinks + self.recent)
        return min(budget, seen)


def _check(name: str, *wanted: tuple[str, Any, int]) -> None:
    for option, value, least in wanted:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: {option}={value!r} is not an integer >= {least}")


Retention = KeepAll | SinkWindow | Importance
COMMON = ("budget", "sinks", "recent", "pyramid", "adaptive")


def options_by_name() -> dict[str, tuple[str, ...]]:
    """Every retention with its options; looked up anew, for policies can be added."""
    policies = {name: (*COMMON, *own_options(name)) for name in POLICIES}
    return {"all": (), "sink": ("sinks", "window", "reposition"), **policies}


def make_retention(name: str, *args: Any, **options: Any) -> Retention:
    """The retention called ``name``."""
    if name == "all":
        return KeepAll()
    return SinkWindow(*args, **options) if name == "sink" else Importance(name, *args, **options)
