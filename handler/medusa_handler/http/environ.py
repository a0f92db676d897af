"""Keys of the WSGI environ by which the server passes things on to the routes."""

from __future__ import annotations

CALLER = "medusa.caller"  # a digest of the token that came with the request
ARRIVAL = "medusa.arrival"  # a number that grows from request to request
GRANT = "medusa.grant"  # the request's Grant of memory for its body
ON_REQUEST_READ = "medusa.on_request_read"  # a function to call when the whole request has been read
FORCE_CLOSE = "medusa.force_close"  # a function that ends the connection with this answer
UNSENT_RESPONSE = "medusa.unsent_response"  # the response, to be closed if it never reaches the server

SMALL_BODY_BYTES = 16 << 10  # the largest body that is waited for before its request begins
