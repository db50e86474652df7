"""How does a conversation at the terminal go? Question, streamed answer, until an empty line."""

import sys

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bonsai_ft.data.sources import Message
from bonsai_ft.generate import answer

HELP = "an empty line or Ctrl-D ends; /clear forgets the conversation; Ctrl-C stops an answer"


def talk(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    template: str | None,
) -> None:
    """Reads questions from stdin and streams answers to stdout."""
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    history = list(head)
    sys.stderr.write(HELP + "\n")
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            # the shell's prompt goes on a line of its own
            sys.stderr.write("\n" if sys.stdin.isatty() else "")
            break
        if not question:
            break
        if question == "/clear":
            history = list(head)
            continue
        history.append({"role": "user", "content": question})
        pieces: list[str] = []

        def write(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()

        try:
            answer(
                model,
                tokenizer,
                [history],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                template=template,
                show=write,
            )
        except KeyboardInterrupt:
            sys.stderr.write(" (stopped)")
        sys.stdout.write("\n")
        history.append({"role": "assistant", "content": "".join(pieces).strip()})
