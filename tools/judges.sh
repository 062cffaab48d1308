#!/bin/sh
# Makes FOLDER ready for tests/judges: other people's tests of an API, and a client that needs its own environment.
#
#     tools/judges.sh FOLDER PYTHON
#
# PYTHON is the interpreter of the environment with webgemma[dev]; the tests that are downloaded are those of the
# versions of `openai` and `anthropic` that are installed there. Nothing is installed outside FOLDER.
set -eu

folder=${1:?usage: tools/judges.sh FOLDER PYTHON}
python=$(cd "$(dirname "${2:?usage: tools/judges.sh FOLDER PYTHON}")" && pwd)/$(basename "$2")
here=$(cd "$(dirname "$0")" && pwd)/judges

version() {
    "$python" -c "from importlib.metadata import version; print(version('$1'))"
}

# What decides about all that follows; the file is written last.
key="openai $(version openai) anthropic $(version anthropic) $(cat "$here/package-lock.json" "$0" | cksum)"
[ "$(cat "$folder/ready" 2>/dev/null)" = "$key" ] && exit
echo "setting up $folder ..."

mkdir -p "$folder/node"
cp "$here/package.json" "$here/package-lock.json" "$folder/node/"
(cd "$folder/node" && npm ci --ignore-scripts --no-audit --no-fund --silent)

# A source distribution holds the tests, a wheel does not.
for name in openai anthropic; do
    wanted=$name-$(version $name)
    if [ ! -d "$folder/$wanted" ]; then
        rm -rf "$folder/unpacked"
        mkdir "$folder/unpacked"
        "$python" -m pip --disable-pip-version-check --quiet download --no-deps --no-binary $name \
            --dest "$folder/unpacked" "$name==${wanted#*-}"
        tar -xzf "$folder/unpacked/$wanted.tar.gz" -C "$folder/unpacked"
        mv "$folder/unpacked/$wanted" "$folder/"
    fi
done

# Makes an environment that has what that of PYTHON has, and other packages besides or instead.
environment() {
    name=$folder/$1
    shift
    [ -x "$name/bin/python" ] || "$python" -m venv --without-pip "$name"
    where='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$python" -c "$where" >"$("$name/bin/python" -c "$where")/webgemma.pth"
    # It also complains of packages that would want what PYTHON has; nobody uses these there.
    "$python" -m pip --python "$name/bin/python" --disable-pip-version-check --quiet install "$@" \
        2>"$name/pip.log" || { cat "$name/pip.log" >&2 && exit 1; }
}

# The plug-ins of pytest that these tests need would be loaded for webgemma's own, too.
environment sdk 'aiohttp>=3.10' 'http-snapshot>=0.1.8' 'inline-snapshot>=0.28' 'pytest-asyncio>=1.4'

# It needs an older `openai`; it imports `mcp` for any tool, but does not require it.
environment litellm 'litellm>=1.106,<2' mcp

echo "$key" >"$folder/ready"
