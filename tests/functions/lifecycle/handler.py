import pathlib

from neighbour import SUFFIX


class Handler:
    def load(self, context):
        self.prefix = f"at most {context.settings.max_concurrency}: "

    def predict(self, request):
        return self.prefix + request.text + SUFFIX

    def close(self):
        pathlib.Path("closed").write_text("yes")
