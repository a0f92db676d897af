"""Keys of the WSGI environ by which the server passes things on to the routes."""

from __future__ import annotations

ARRIVED = "medusa.arrived"  # a number that grows from request to request
GRANT = "medusa.grant"  # the request's Grant of memory for its body
WHOLE = "medusa.whole"  # a function to call when the whole request has been read
CLOSE = "medusa.close"  # a function that ends the connection with this answer
UNSENT = "medusa.unsent"  # the response of work, to be closed where the server never gets it

SMALL_BODY_BYTES = 16 << 10  # a request begins when its head has come, and its body if it is not larger than this
