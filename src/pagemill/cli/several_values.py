"""Takes several values behind one flag, as vLLM's command line does: `--served-model-name A B`."""

from __future__ import annotations

from typing import Any

from pagemill.cli.help import HelpInSections

FLAGS = ("--api-key", "--lora-modules", "--served-model-name")


class SeveralValues(HelpInSections):
    """A command whose `FLAGS` may be followed by several values, where its argument stands before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, one_by_one(args))


def one_by_one(args: list[str]) -> list[str]:
    """Returns a command line with each of `FLAGS` before each of its values.

    Where the first word is a flag, the command's argument may be behind a value: nothing is changed then.
    """
    if not args or args[0].startswith("-"):
        return args
    spread: list[str] = []
    flag = ""
    for word in args:
        if word.startswith("-"):
            flag = word.partition("=")[0] if word.partition("=")[0] in FLAGS else ""
        elif flag and spread[-1] != flag:
            spread.append(flag)
        spread.append(word)
    return spread
