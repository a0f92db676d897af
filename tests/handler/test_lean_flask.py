"""The lean import of Flask, each case in a process of its own, as Flask can be imported once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LEAN = "from medusa_handler.http.lean_flask import import_leanly\nimport_leanly()\n"
# What serving uses.
APP = """
import io, json, sys
import flask
from flask import Blueprint, Flask, Response, jsonify, request

app = Flask("m", static_folder=None, template_folder=None)
routes = Blueprint("routes", __name__)

@routes.post("/echo/<name>")
def echo(name):
    return jsonify({"name": name, "body": request.get_json(), "is": isinstance(flask.current_app, Flask)})

@routes.post("/form")
def form():
    return jsonify({"form": request.form, "file": request.files["f"].read().decode()})

@routes.get("/stream")
def stream():
    return Response((piece for piece in ("a", "b")), content_type="text/plain")

app.register_blueprint(routes)
"""
# What a user's function could do with Flask.
USED = """
@app.get("/page")
def page():
    return flask.render_template_string("{{ request.path }} {{ what|upper }} {{ url_for('page') }}", what="<b>")

import decimal, email.utils, hashlib, hmac, platform, secrets
@app.get("/seen")
def seen():
    flask.session["seen"] = flask.session.get("seen", 0) + 1
    answer = jsonify({"seen": flask.session["seen"], "price": decimal.Decimal("1.50")})
    answer.last_modified = 0
    answer.add_etag()
    return answer

app.secret_key = "key"
out = []
client = app.test_client()
out.append(client.post("/echo/x", json={"a": [1]}).get_json())
out.append(client.get("/stream").text)
out.append(client.post("/form", data={"a": "1", "f": (io.BytesIO(b"content"), "name")}).get_json())
out.append([client.get("/none").status_code, client.get("/echo/x").status_code])

app.jinja_env.globals["x"] = 1
out.append(client.get("/page").text)
app.cli.name = "named"

@app.cli.command("hello")
def hello():
    print("hello")

out.append([app.cli.name, sorted(app.cli.commands), app.test_cli_runner().invoke(args=["hello"]).output])
other = Flask("other", template_folder=None)
other.cli.add_command(flask.cli.AppGroup("group"))
out.append(sorted(other.cli.commands))
from flask.cli import AppGroup, FlaskGroup
from flask.templating import Environment
from werkzeug.test import Client, EnvironBuilder
from werkzeug.serving import is_running_from_reloader
import click, jinja2.sandbox, werkzeug
out.append([issubclass(AppGroup, click.Group), issubclass(Environment, jinja2.Environment), is_running_from_reloader()])
out.append([type(app.jinja_env) is Environment, werkzeug.Client(app).get("/stream").text, jinja2.BaseLoader.__name__])
out.append([flask.render_template.__name__, jinja2.sandbox.SandboxedEnvironment().from_string("{{ 1 + 1 }}").render()])
from werkzeug.security import check_password_hash, generate_password_hash
out.append([check_password_hash(generate_password_hash("secret"), word) for word in ("secret", "other")])

answers = [client.get("/seen") for _ in range(2)]
client.set_cookie("session", "forged")
out.append([(each.text, each.get_etag(), each.headers["Last-Modified"]) for each in (*answers, client.get("/seen"))])
try:
    app.url_map.bind("host").build("pag")
except werkzeug.routing.BuildError as error:
    out.append(str(error))
out.append([hashlib.sha1(b"x").hexdigest(), platform.system(), len(secrets.token_hex(4)), decimal.getcontext().prec])
out.append([hmac.new(b"k", b"m", "sha256").hexdigest(), email.utils.formatdate(0, usegmt=True)])
print(json.dumps(out))
"""


def run(code: str, *folders: Path) -> str:
    code = f"import sys\nsys.path[:0] = {[str(folder) for folder in folders]}\n{code}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, *folders: Path) -> set[str]:
    """The modules that the code has executed, of those that a lean import leaves out."""
    found: list[str] = json.loads(run(code + "import json, sys\nprint(json.dumps(list(sys.modules)))", *folders))
    left_out = ("_hashlib", "click.", "email._parseaddr", "jinja2.", "http.server", "werkzeug.sansio.multipart")
    return {name for name in found if name.startswith(left_out)}


def test_an_app_is_made_without_templates_commands_and_servers() -> None:
    assert loaded(LEAN + APP) == set()
    assert {"_hashlib", "click.core", "jinja2.environment", "http.server"} <= loaded(APP)


def test_whatever_uses_them_gets_the_real_ones() -> None:
    assert run(LEAN + APP + USED) == run(APP + USED)


def test_a_url_can_be_built_though_it_is_compiled_late() -> None:
    from medusa_handler.http.app import _Rule
    from werkzeug.routing import Map

    urls = Map([_Rule("/items/<int:number>", endpoint="item")]).bind("host")
    assert urls.build("item", {"number": 7, "q": "a b"}) == "/items/7?q=a+b"
    assert urls.build("item", {"number": 8, "q": "a b"}, append_unknown=False) == "/items/8"


def test_a_version_that_was_not_tested_is_imported_plainly(tmp_path: Path) -> None:
    """As one whose version cannot be seen, or whose modules are elsewhere."""
    import flask

    source = Path(flask.__file__).parent
    (tmp_path / "flask").symlink_to(source)
    assert "click.core" in loaded(LEAN + APP, tmp_path)
    (tmp_path / "flask-3.1.99.dist-info").mkdir()
    assert loaded(LEAN + APP, tmp_path) == set()
    (tmp_path / "flask-3.1.99.dist-info").rename(tmp_path / "flask-4.0.0.dist-info")
    assert "click.core" in loaded(LEAN + APP, tmp_path)
