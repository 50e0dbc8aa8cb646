"""A character tokenizer for models that have none: every printable ASCII character and a newline is one token.

Ids 0, 1 and 2 are padding, beginning and end. It exists so that smoke tests need no files; it has no chat template.
"""

from __future__ import annotations

from collections.abc import Iterable

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))


class CharacterTokenizer:
    """``encode`` refuses characters outside its alphabet; ``decode`` drops special tokens."""

    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2
    chat_template = None
    vocab_size = len(_SPECIAL) + len(_ALPHABET)

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return {token: index for index, token in enumerate((*_SPECIAL, *_ALPHABET))}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``, a BOS in front if asked. Raises ValueError on a foreign character."""
        ids = [self.bos_token_id] if add_special_tokens else []
        for position, character in enumerate(text):
            index = _ALPHABET.find(character)
            if index < 0:
                raise ValueError(
                    f"character {character!r} at position {position} is outside the character tokenizer's alphabet "
                    "(printable ASCII and newline)"
                )
            ids.append(index + len(_SPECIAL))
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids outside the vocabulary raise IndexError."""
        pieces = []
        for token_id in token_ids:
            if int(token_id) < len(_SPECIAL):
                pieces.append("" if skip_special_tokens else _SPECIAL[int(token_id)])
            else:
                pieces.append(_ALPHABET[int(token_id) - len(_SPECIAL)])
        return "".join(pieces)
