"""Turn off the clients' own retries: ``Store.ask`` retries instead, with one policy.

Only its client can resend parts of a stream that is uploaded: gcsfs and adlfs still do.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from ckptool.storage.clients.ranged_read import is_s3
from ckptool.storage.retry import lasts


def end_own_retries(fs: Any) -> None:
    """Make a file system send each request once, if others can send it again."""
    if is_s3(fs):
        fs.retries = 1
    elif hasattr(fs, "service_client"):
        _end_those_of_adlfs(fs.service_client._config.retry_policy)
    elif hasattr(getattr(fs, "_request", None), "__wrapped__"):
        _end_those_of_gcsfs(fs)


def _end_those_of_adlfs(policy: Any) -> None:
    """Send requests once except blocks: azure-storage-blob (12.31) waits 57 seconds in four."""
    if "configure_retries" in vars(policy):
        return
    configure = type(policy).configure_retries

    def configure_retries(request: Any) -> dict[str, Any]:
        settings: dict[str, Any] = configure(policy, request)
        if request.http_request.query.get("comp") not in ("block", "blocklist"):
            settings["total"] = 0
        return settings

    policy.configure_retries = configure_retries


def _end_those_of_gcsfs(fs: Any) -> None:
    """Send requests once except parts: gcsfs (2026.10) waits 31 seconds in six."""
    again, once, file_system = type(fs)._request, fs._request.__wrapped__, ref(fs)

    async def request(method: str, path: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await once(file_system(), method, path, *arguments, **named)
        except Exception as error:
            is_part = "upload_id=" in path or named.get("uploadType") == "resumable"
            if not is_part or lasts(error):
                raise
        return await again(file_system(), method, path, *arguments, **named)

    fs._request = request
