"""Which directories a client may save to and load from. Called by ``ps/server/dispatch.py``.

A server writes and reads as its own user, so a client must not choose where: everything is below
one directory that the server was given. Links are followed before that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.ps.state.refusal import Code, Refusal

_LONGEST = 4096


class SaveRoot:
    """Everything below one directory, or nothing.

    Args:
        root: The directory; it need not be there yet.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else root.resolve()

    def directory(self, control: Mapping[str, Any], code: Code) -> Path:
        """The directory a message names.

        Its ``path`` is absolute, or relative to the root. ``relative`` is what the user wrote if it
        was relative: it is taken below the root if the path is not there.

        Raises:
            Refusal: It is none, or is not below the root, or has links that lead out of it.
        """
        text, relative = _text(control, "path", code), control.get("relative")
        if self._root is None:
            raise Refusal(
                code,
                "this server was given no directory for saves, so it neither saves nor loads: "
                "start it with --save-root DIR, or with --dir DIR (saves are in DIR/saves then)",
            )
        found = self._below(text)
        if found is None and relative is not None:
            found = self._below(_text(control, "relative", code))
        if found is None:
            raise Refusal(
                code,
                f"{text!r} is not below {self._root}, where this server saves and loads: name a "
                "directory there, or one relative to it, or start it with another --save-root",
            )
        self._check_links(found, code)
        return found

    def _below(self, text: str) -> Path | None:
        assert self._root is not None
        try:
            path = (self._root / text).resolve()
        except (OSError, RuntimeError):  # a loop of links, a name that is too long
            return None
        return path if path.is_relative_to(self._root) else None

    def _check_links(self, directory: Path, code: Code) -> None:
        """Files that are there already would be read, or written through."""
        assert self._root is not None
        try:
            links = [each for each in directory.iterdir() if each.is_symlink()]
        except OSError:  # not there, or no directory: found out later
            return
        for link in links:
            if self._below(str(link)) is None:
                raise Refusal(code, f"{link} is a link that leads out of {self._root}: remove it")


def _text(control: Mapping[str, Any], name: str, code: Code) -> str:
    text = control.get(name)
    if not isinstance(text, str) or not text or len(text) > _LONGEST or "\0" in text:
        raise Refusal(code, "a message to save or load names its directory as `path`")
    return text
