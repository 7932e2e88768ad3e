"""Verdict files as `report --format verdict` writes them, for what is installed where a test runs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from toto_compat.contract.request import Device
from toto_compat.production.installed import installed_for

TODAY = datetime.now(UTC).date()


def row(**changes: Any) -> dict[str, Any]:
    """A row that was judged on exactly what is installed here, on the CPU."""
    here = installed_for(Device.CPU, None)
    return {
        "cell": "torch-2.13.0-cpu/fixed_size/default",
        "device": "cpu",
        "torch": here.torch or "2.13.0+cpu",
        "toto_ts": here.toto_ts or "0.2.0",
        "xformers": here.xformers,
        "gpu": None,
        "cache": "fixed_size",
        "cache_class": "toto_compat.caches.fixed_size:FixedSizeKVCache",
        "source_hash": here.source_hash,
        "mode": "default",
        "settings": {},
        "judged": TODAY.isoformat(),
        **changes,
    }


def verdict(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": "nightly",
        "judged": TODAY.isoformat(),
        "review_by": (TODAY + timedelta(days=90)).isoformat(),
        "devices": {"cpu": {"answer": "enable", "sentence": "", "reason": "all gates", "rows": list(rows)}},
        **changes,
    }


def write_verdict(folder: Path, *rows: dict[str, Any], **changes: Any) -> Path:
    path = folder / "verdict.json"
    path.write_text(json.dumps(verdict(*rows, **changes)), encoding="utf-8")
    return path
