#!/bin/sh
# The report page's test opens it in headless Chromium. Installs Debian's package where this user may; else says how.
set -eu
command -v chromium >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
    echo "chromium is missing: install it (Debian: sudo apt-get install chromium) for the report page's test" >&2
    exit 1
fi
