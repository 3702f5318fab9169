"""A server on this machine that speaks Google Cloud Storage's protocol; prints its port.

What the emulator lacks and the clients rely on is added: the generation of what is downloaded, and uploads that are
refused where the object is not of the generation that is asked for.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

BUCKET = "bucket"
_one_upload = threading.Lock()


def _generation(storage: Any, bucket: str, name: str) -> str:
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def _with_generation(answer: Callable[..., None]) -> Callable[..., None]:
    def handle(request: Any, response: Any, storage: Any, *rest: Any) -> None:
        answer(request, response, storage, *rest)
        if answer is objects.download or request.query.get("alt") == ["media"]:
            place = request.params["bucket_name"], request.params["object_id"]
            response["X-Goog-Generation"] = _generation(storage, *place)

    return handle


def _insert(request: Any, response: Any, storage: Any, *rest: Any) -> None:
    with _one_upload:
        wanted = request.query.get("ifGenerationMatch")
        name = request.query.get("name", [None])[0]
        if wanted and _generation(storage, request.params["bucket_name"], name) != wanted[0]:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            objects.insert(request, response, storage, *rest)


class _Handler(emulator.RequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def handle_expect_100(self) -> bool:
        self.send_response_only(HTTPStatus.CONTINUE)
        self.end_headers()
        self.wfile.flush()
        return True


def main() -> None:
    """Serves until it is ended."""
    replaced = {
        objects.download: _with_generation(objects.download),
        objects.get: _with_generation(objects.get),
        objects.insert: _insert,
    }
    for _, handlers in emulator.HANDLERS:
        handlers |= {method: replaced.get(handler, handler) for method, handler in handlers.items()}
    storage = emulator.Storage(use_memory_fs=True)
    emulator.buckets.create_bucket(BUCKET, storage)
    with ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: _Handler(storage, *given)) as http:
        print(http.server_address[1], flush=True)
        http.serve_forever()


if __name__ == "__main__":
    main()
