"""Which tokens stay? Rules that are a function of position alone.

``sinks`` first tokens and the last ``window`` tokens stay (StreamingLLM, Xiao et al., arXiv:2309.17453, section 3.2:
the first tokens soak up attention that has to go somewhere; dropping them breaks the model). The window includes the
token itself, as sliding-window layers count it:

    query p attends to token t   iff   t <= p  and  (t < sinks  or  p - t < window)

Kept keys keep the rotation they were stored with.
"""

from __future__ import annotations


class KeepAll:
    """Every token stays."""

    sinks, window, evicts = 0, None, False
    spec = "all"


class SinkWindow:
    """The first ``sinks`` and the last ``window`` tokens stay.

    Raises:
        ValueError: ``sinks`` is negative, ``window`` is not at least 1, or either is no integer.
    """

    evicts = True

    def __init__(self, sinks: int = 4, window: int = 1020) -> None:
        for name, value, least in (("sinks", sinks, 0), ("window", window, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"sink: {name}={value!r} is not an integer >= {least}")
        self.sinks, self.window = sinks, window

    @property
    def spec(self) -> str:
        return f"sink({self.sinks},{self.window})"


RETENTIONS: dict[str, type[KeepAll] | type[SinkWindow]] = {"all": KeepAll, "sink": SinkWindow}
Retention = KeepAll | SinkWindow
