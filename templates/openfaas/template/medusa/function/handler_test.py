import unittest
from types import SimpleNamespace

from handler import handle


class HandleTest(unittest.TestCase):
    def test_greets(self):
        event = SimpleNamespace(body=b'{"name": "Ada"}', headers={}, method="POST", query={}, path="/")
        assert handle(event, None) == {"statusCode": 200, "body": {"hello": "Ada"}}
