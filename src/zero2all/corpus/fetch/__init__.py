"""Downloads from the Hugging Face Hub and from web servers, which may be slow, broken or hostile.

``fetch.py`` runs a command, ``sources.py`` lists what there is to download, ``download.py`` downloads one file.
Requests go through ``zero2all.base.network.http_client``.
"""

from zero2all.corpus.fetch.fetch import FetchResult, fetch_files, list_files
from zero2all.corpus.fetch.sources import FetchOptions

__all__ = ["FetchOptions", "FetchResult", "fetch_files", "list_files"]
