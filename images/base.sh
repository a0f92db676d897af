#!/bin/sh
# What every stage stands on: Python with a compiled standard library, the variant's Debian packages, a user.
set -eu
variant=$1
packages=$(python3 -c 'import sys, tomllib
print(*tomllib.load(open("/build/variants.toml", "rb"))[sys.argv[1]].get("apt", []))' "$variant")
if [ -n "$packages" ]; then
    apt-get update -q
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $packages
    apt-get clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/log/apt /var/log/dpkg.log
fi
# The public Python images come without bytecode; under a read-only root every start would compile it again.
stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
if ! ls "$stdlib"/__pycache__/os.*.pyc >/dev/null 2>&1; then
    python3 -m compileall -q --invalidation-mode unchecked-hash -x '/(test|tests|idlelib|lib2to3|site-packages|dist-packages)/' "$stdlib"
fi
# Nothing demands this user: it is there for platforms that want a name (OpenFaaS: app).
grep -q '^app:' /etc/passwd || useradd --uid 1000 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin app
