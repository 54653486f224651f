"""Takes secrets out of what leaves a machine: nothing of ours reads one, this is for what others wrote."""

from __future__ import annotations

import re

HIDDEN = "***"
NAMES = "TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY|PRIVATE_KEY"
PATTERNS = (
    # NAME=value, "NAME": "value", name: value; a name may have a prefix (HF_TOKEN), no ending (tokens)
    re.compile(rf"""(?i)(\b(?:[A-Z0-9]+_)*(?:{NAMES})["']?\s*[=:]\s*["']?)([^\s"',}}]+)"""),
    re.compile(r"(?i)(--[a-z-]*(?:token|password|secret|api-key)[= ])([^\s\"',]+)"),
    re.compile(r"(\bBearer\s+)(\S+)"),
    re.compile(r"(://)[^/\s:@]+:([^/\s@]+)@"),
    re.compile(r"(\b)(hf_[A-Za-z0-9]{16,}|ghp_[A-Za-z0-9]{16,}|nvapi-[A-Za-z0-9_-]{16,})"),
    re.compile(r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----)(.*?)(?=-----END|\Z)"),
)


def redact(text: str) -> str:
    """Return `text` with every value that looks like a secret replaced by ***."""
    for pattern in PATTERNS:
        text = pattern.sub(lambda found: f"{found[1]}{HIDDEN}" + ("@" if found[1] == "://" else ""), text)
    return text
