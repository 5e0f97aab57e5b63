"""Data messages for tests: sections, integers and values become frames."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.ps.protocol.wire import Frame, Head, Section, pack_head, pack_section


def pack_data(
    head: Head, sections: Sequence[Section], integers: Frame, values: Frame
) -> list[Frame]:
    """A message with arrays in it. ``integers`` and ``values`` are laid out as said above."""
    records = map(pack_section, sections)
    return [b"".join((pack_head(head, len(sections)), *records)), integers, values]
