"""Masks secrets before a configuration is written: by the name of a field, and by the look of a value.

A token of a language model is no secret: ``max_tokens``, ``tokens_seen``, ``pad_token`` and ``tokenizer`` stay.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, cast

MASK = "***masked***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Words that make a name secret wherever they stand in it.
_SECRET = frozenset(
    {
        *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials"),
        *("apikey", "apikeys", "privatekey", "accesskey", "secretkey", "authorization", "bearer", "cookie", "cookies"),
        "webhook",
    }
)
#: What makes the word "key" or "keys" after it secret; "vocab_key" and "key_dim" are not.
_KEY_OWNERS = frozenset(("api", "access", "private", "secret", "signing", "encryption", "account", "auth"))
#: What makes the word "token" or "tokens" after it secret; alone, "token" is secret too.
_TOKEN_OWNERS = frozenset(
    {
        *("api", "auth", "access", "bearer", "refresh", "session", "secret", "id", "bot", "user", "client", "csrf"),
        *("jwt", "oauth", "personal", "security", "service", "sas", "write", "read", "login", "pat", "hf", "hub"),
        *("huggingface", "wandb", "github", "gh", "gitlab", "git", "slack", "aws", "azure", "gcp", "google", "openai"),
        *("anthropic", "comet", "neptune", "mlflow"),
    }
)

_VALUES = re.compile(
    "|".join(
        (
            r"\bhf_[A-Za-z0-9]{16,}",
            r"\bsk-[A-Za-z0-9_\-]{16,}",
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
            r"\bgh[pousr]_[A-Za-z0-9]{20,}",
            r"\bgithub_pat_[A-Za-z0-9_]{20,}",
            r"\bglpat-[A-Za-z0-9_\-]{16,}",
            r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}",
            r"\bAIza[0-9A-Za-z_\-]{35}",
            r"\bya29\.[0-9A-Za-z_\-]{20,}",
            r"\bnvapi-[A-Za-z0-9_\-]{20,}",
            r"\b(?:gsk|r8|npm|pypi|dop_v1)[_-][A-Za-z0-9_\-]{20,}",
            r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{4,}",
            r"https://hooks\.slack\.com/services/\S+",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        )
    )
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{8,}")
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.\-]*://)[^\s/@'\"]+@")
_ASSIGNED = re.compile(r"([A-Za-z][A-Za-z0-9_.\-]*)(=|\s*:\s*|\s+)")
_ASSIGNED_VALUE = re.compile(r"(?i)\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s&;,]+")


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret: ``hf_token`` and ``apiKey`` do, ``max_tokens`` does not."""
    words = [each.lower() for each in _WORDS.findall(name)]
    if not words:
        return False
    if words in (["token"], ["connection", "string"]) or words[-1] == "auth" or not _SECRET.isdisjoint(words):
        return True
    return any(
        (second in ("key", "keys") and first in _KEY_OWNERS)
        or (second in ("token", "tokens") and first in _TOKEN_OWNERS)
        for first, second in itertools.pairwise(words)
    )


def mask(value: Any) -> Any:
    """A copy of a JSON-like value in which secrets are replaced by ``MASK``; numbers under a secret name too."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {key: _hidden(item) if is_secret_name(str(key)) else mask(item) for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        return _masked_list(list(cast("list[Any]", value)))
    return value


def mask_text(text: str) -> str:
    """Replace what looks like a secret inside a text: known key formats, URL credentials, ``--api-key VALUE``."""
    text = _VALUES.sub(MASK, text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    return _SCHEME.sub(rf"\1 {MASK}", _masked_assignments(text))


def _masked_assignments(text: str) -> str:
    pieces: list[str] = []
    done = 0
    for found in _ASSIGNED.finditer(text):
        if found.start() < done or not is_secret_name(found[1]):
            continue
        # A space assigns on a command line only (--token abc); in prose it does not.
        if not found[2].strip() and text[found.start() - 1 : found.start()] != "-":
            continue
        if value := _ASSIGNED_VALUE.match(text, found.end()):
            pieces += [text[done : found.end()], MASK]
            done = value.end()
    return "".join([*pieces, text[done:]])


def _masked_list(items: list[Any]) -> list[Any]:
    """A command line as a list: the word after ``--api-key`` is its value."""
    masked: list[Any] = []
    for at, item in enumerate(items):
        before = items[at - 1] if at else None
        follows = isinstance(before, str) and before.startswith("-") and "=" not in before and is_secret_name(before)
        takes = isinstance(item, str) and not item.startswith("-")
        masked.append(MASK if follows and takes else mask(item))
    return masked


def _hidden(value: Any) -> Any:
    """Everything under a secret name, its containers kept so that their shape can be seen."""
    if value is None or isinstance(value, bool) or value == "":
        return value
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in cast("list[Any]", value)]
    return MASK
