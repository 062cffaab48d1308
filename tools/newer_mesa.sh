#!/bin/sh
# Makes FOLDER/run, which starts a program with a newer Mesa than the system's, and touches nothing else.
#
#     tools/newer_mesa.sh FOLDER
#     FOLDER/run .venv/bin/python -m pytest …
#
# Mesa's software GPU has matrix units since Mesa 26. On an older Debian, its packages and all that they need are
# unpacked into the folder, the C library included: hence a program has to be started by that library's own loader.
set -eu

folder=${1:?usage: tools/newer_mesa.sh FOLDER}
suite=trixie # stable, and its backports have Mesa 26

fail() {
    echo "newer_mesa.sh: $1" >&2
    exit 1
}

[ -x "$folder/run" ] && exit # written last
command -v apt-get >/dev/null || fail "this needs apt-get, that is, Debian or a system made from it."
rm -rf "$folder"
mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial" "$folder/tree"
folder=$(cd "$folder" && pwd)
: >"$folder/state/status" # nothing is installed, so that every dependency is downloaded

# apt with sources and a state of its own; proxies and the like are the system's.
own_apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State="$folder/state" -o Dir::State::status="$folder/state/status" \
        -o Dir::Cache="$folder/cache" -o APT::Install-Recommends=0 -o APT::Sandbox::User="$(id -un)" \
        -o APT::Update::Error-Mode=any -o Acquire::Languages=none "$@"
}

# The system's sources say where packages come from; the first of these places that has the suite is used.
found=
for place in $(apt-get update --print-uris | sed -n "s#^'\(.*\)/dists/.*#\1#p" | sort -u); do
    for wanted in "$suite" "$suite-backports"; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $place $wanted main"
    done >"$folder/sources.list"
    if own_apt update >"$folder/log" 2>&1; then
        found=yes
        break
    fi
done
[ "$found" ] || fail "none of the places in the system's apt sources has Debian $suite and $suite-backports."

own_apt install -y --download-only -t "$suite-backports" mesa-vulkan-drivers libvulkan1 >"$folder/log" 2>&1 ||
    fail "the packages cannot be downloaded; $folder/log says why."
for package in "$folder"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$folder/tree"
done
rm -rf "$folder/state" "$folder/cache" "$folder/sources.list" "$folder/log"

cd "$folder"
driver=$(find tree/usr/lib -name libvulkan_lvp.so)
loader=$(find "$(dirname "$driver")" -maxdepth 1 -name 'ld-linux*')
[ "$loader" ] || fail "the packages have no loader beside the software GPU."
cat >lavapipe.json <<END
{"file_format_version": "1.0.1", "ICD": {"library_path": "./$driver", "api_version": "1.4.0"}}
END
cat >run.new <<END
#!/bin/sh
# Starts the program that is named first with the libraries beside this file.
here=\$(cd "\$(dirname "\$0")" && pwd)
export VK_ICD_FILENAMES="\$here/lavapipe.json"
exec "\$here/$loader" --library-path "\$here/$(dirname "$driver")" "\$@"
END
chmod +x run.new
mv run.new run
