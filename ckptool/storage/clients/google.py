"""Google Cloud Storage: the address and the credentials of a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckptool.storage.clients.service import Service, Settings

_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"
_ENDPOINT = "https://storage.googleapis.com"
_NO_MATTER = ("access", "consistency", "check_connection", "default_location")
"""Settings of gcsfs for what is not done here."""


class Google(Service):
    """Buckets of Google. ``options`` are those of gcsfs, or obstore's own settings of GCS."""

    def open(self, bucket: str, settings: Settings) -> Any:
        """Return obstore's store for a bucket; a header names who pays, as google-auth does."""
        from obstore.store import GCSStore

        options = {n: value for n, value in self.options.items() if n not in _NO_MATTER}
        address = options.pop("endpoint_url", None) or os.environ.get("STORAGE_EMULATOR_HOST")
        endpoint = (address or _ENDPOINT).rstrip("/")
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        is_emulator = endpoint.startswith("http:")  # gets no token that it was not given
        provider = _provider(options.pop("token", "anon" if is_emulator else None))
        credentials = getattr(provider, "credentials", None)
        project, payer = options.pop("project", None), options.pop("requester_pays", False)
        payer = project if payer is True else payer
        payer = payer or getattr(credentials, "quota_project_id", None)
        if provider is None and is_emulator:  # obstore (0.12) signs what it writes in any case
            provider = _static("anonymous")
        config: Any = {"base_url": endpoint, "skip_signature": provider is None, **options}
        headers = {"x-goog-user-project": payer} if payer else {}
        more = settings.options(endpoint, default_headers=headers)
        return self.build(
            lambda: GCSStore(bucket, config=config, credential_provider=provider, **more)
        )


def _provider(token: Any) -> Callable[[], Any] | None:
    """Return what gives obstore tokens; None for nobody.

    ``token`` is gcsfs's: a token, a file of credentials or what is in one, ``anon``, or None for
    what google-auth finds, or nobody if that is nothing.
    """
    if token == "anon":
        return None
    is_named = isinstance(token, str) and token in ("google_default", "cloud")
    is_file = isinstance(token, str) and os.path.exists(token)
    if isinstance(token, str) and not (is_named or is_file):
        return _static(token)
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from obstore.auth.google import GoogleCredentialProvider

    auth: Any = google.auth
    scopes = [_SCOPE]
    try:
        if isinstance(token, dict):
            credentials, _ = auth.load_credentials_from_dict(token, scopes=scopes)
        elif is_file:
            credentials, _ = auth.load_credentials_from_file(token, scopes=scopes)
        elif token is None or is_named:
            credentials, _ = auth.default(scopes=scopes)
        else:
            credentials = token
    except DefaultCredentialsError:
        if token is None:
            return None
        raise
    provider: Callable[[], Any] = GoogleCredentialProvider(credentials)
    return provider


def _static(token: str) -> Callable[[], Any]:
    return lambda: {"token": token, "expires_at": None}
