"""lerobot's pi0-FAST as it speaks: PaliGemma reads a prompt and says words, each from all before.

Everything here is laid out as lerobot's own sampling lays it out: images, prompt and the mark that
begins the answer attend to each other in both directions, and what is said comes causally after
them. lerobot's training has that mark among what is said; the same words then have probabilities
that differ in the second digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from policies.checkpoints import BadCheckpoint

_TOKENS, _TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
_OPENING, _END = "Action: ", "|"


class Heard(NamedTuple):
    """What the language model makes of a prompt and of what was said after it."""

    hidden: Tensor
    """[B, 1 + S, width]: at the mark that begins the answer, and at the S tokens said."""
    pooled: Tensor
    """float32 [B, width]: the mean over the prompt's real tokens."""
    mask: Tensor
    """bool [B, L + S]: which of all tokens are real."""


class Speech(nn.Module):
    """One of lerobot's pi0-FAST policies, which stays the owner of the weights. Words are those of
    `word_sequences`; lerobot writes FAST token i as the text token that lies i below the highest
    ones (`fast_skip_tokens`)."""

    action_ids: Tensor
    opening: Tensor

    def __init__(self, native: Any, tokenizer: Any, num_fast_tokens: int) -> None:
        """`tokenizer` is that of the prompts. Raises BadCheckpoint if it does not fit."""
        super().__init__()
        self.native = native
        begin, end = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(_END)
        highest = tokenizer.vocab_size - 1 - native.config.fast_skip_tokens
        ids = [highest - number for number in range(num_fast_tokens)]
        opening = tokenizer.encode(_OPENING, add_special_tokens=False)
        rows = self._word_head.weight.shape[0]
        if begin is None or end in (None, tokenizer.unk_token_id) or not opening:
            raise BadCheckpoint(
                f"the text tokenizer has no mark to begin with or no word {_END!r}, which ends the "
                f"actions of pi0_fast; set policy.tokenizer to a copy of the checkpoint's own"
            )
        if ids[-1] < 0 or max(ids[0], end, begin, *opening) >= rows:
            raise BadCheckpoint(
                f"the text tokenizer has {tokenizer.vocab_size} tokens, the FAST processor "
                f"{num_fast_tokens} and the checkpoint {rows} words with "
                f"fast_skip_tokens={native.config.fast_skip_tokens}: these do not belong together; "
                f"set policy.tokenizer and policy.processor to copies of the checkpoint's own"
            )
        self.begin = int(begin)
        self.register_buffer("action_ids", torch.tensor([end, *ids]), persistent=False)
        self.register_buffer("opening", torch.tensor(opening), persistent=False)

    @property
    def images(self) -> list[str]:
        """What it looks at, in its order."""
        return [key for key in self.native.config.image_features if ".empty_camera_" not in key]

    @property
    def width(self) -> int:
        """Of the language model."""
        size: int = self._language.config.hidden_size
        return size

    def hear(self, batch: Mapping[str, Tensor], words: Tensor, cache: Any = None) -> Heard:
        """A batch as the preprocessor leaves it, the opening, and words [B, S] after it, all in
        one pass. Keys and values go to the cache, if there is one."""
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        model = self.native.model
        images, image_masks = self.native._preprocess_images(dict(batch))
        said, real = self.said(words)
        asked = pad(batch[_TOKENS], (0, 1), value=self.begin)
        shown = pad(batch[_TOKEN_MASK].bool(), (0, 1), value=True)
        embedded, mask, attention, _, _ = model.embed_prefix_fast(
            images, image_masks, asked, shown, said, real
        )
        hidden = self._run(
            embedded,
            prepare_attention_masks_4d(attention, dtype=embedded.dtype),
            torch.cumsum(mask, dim=1) - 1,
            cache,
        )
        length = hidden.shape[1] - said.shape[1]
        weight = mask[:, :length, None].float()
        pooled = (hidden[:, :length].float() * weight).sum(1) / weight.sum(1)
        return Heard(hidden[:, length - 1 :], pooled, mask)

    def go_on(self, word: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Hidden states [B, width] after one more word [B], and the mask that covers it."""
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        mask = pad(mask, (0, 1), value=True)
        ids = self.action_ids[word][:, None]
        embedded = self.native.model.paligemma_with_expert.embed_language_tokens(ids)
        attention = prepare_attention_masks_4d(mask[:, None], dtype=embedded.dtype)
        position = mask.sum(dim=1, keepdim=True) - 1
        return self._run(embedded, attention, position, cache)[:, -1], mask

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., 1 + FAST tokens] of hidden states [..., width]: of the end and of actions,
        which alone can be said; lerobot draws from all of its text vocabulary."""
        return linear(hidden, self._word_head.weight[self.action_ids]).float()

    def text_logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V] of all words of the text vocabulary."""
        logits: Tensor = self._word_head(hidden).float()
        return logits

    def said(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Text tokens [B, S] of the opening and of words, and which are no padding."""
        real = pad(words >= 0, (len(self.opening), 0), value=True)
        opening = self.opening.expand(len(words), -1)
        return torch.cat([opening, self.action_ids[words.clamp_min(0)]], dim=1), real

    def adaptable(self) -> dict[str, nn.Module]:
        """The linear layers by name that adapters can change: all but the word head, of which only
        some rows are computed."""
        return {
            name: part
            for name, part in self.native.named_modules()
            if isinstance(part, nn.Linear) and part is not self._word_head
        }

    def _run(self, embedded: Tensor, attention: Tensor, positions: Tensor, cache: Any) -> Tensor:
        (hidden, _), _ = self.native.model.paligemma_with_expert.forward(
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            inputs_embeds=[embedded, None],
            use_cache=cache is not None,
        )
        found: Tensor = hidden
        return found

    @property
    def _language(self) -> Any:
        return self.native.model.paligemma_with_expert.paligemma.model.language_model

    @property
    def _word_head(self) -> Any:
        return self.native.model.paligemma_with_expert.paligemma.lm_head
