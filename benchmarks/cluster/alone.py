"""Start `medusa serve` once for each input line, and print the milliseconds from its exec to its first token.

``python -m benchmarks.cluster.alone BODY FLAG…`` runs in the node whose agent the flags name. BODY is a request as
JSON, and the flags are those of `medusa serve`.
"""

from __future__ import annotations

import json
import sys

from medusa_adapters.bench.served_instance import ServedInstance, serve_command


def main() -> int:
    body, *flags = sys.argv[1:]
    request = json.loads(body)
    print("ready", flush=True)
    for _ in sys.stdin:
        with ServedInstance(serve_command(*flags)) as instance:
            completion = instance.completion(request)
            print(json.dumps([(completion.first_token_ns - instance.started_ns) / 1e6, completion.text]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
