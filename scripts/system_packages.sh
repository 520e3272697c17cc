#!/usr/bin/env bash
# Find out which system packages are missing, and install them with apt where that is allowed (root, or sudo without
# a password). Nothing is asked of apt where nothing is missing.
#
#   scripts/system_packages.sh simulators           what ManiSkill and LIBERO draw with
#   scripts/system_packages.sh PACKAGE...           these packages
#   scripts/system_packages.sh --check ...          only say what is missing
#
# Exit codes: 1 apt failed, 3 packages are missing and can't be installed by this user (the command is printed).
#
# SAPIEN draws on the CPU through Mesa's Vulkan driver, lavapipe. Debian 12's own Mesa, 22.3, is too old for it
# ("Failed to find a supported physical device"), so it comes from the backports suite, on the mirror that this machine
# uses already: no host is named here. DEBIAN_MIRROR overrides that mirror. SYSTEM_PACKAGES=ignore skips everything.
set -euo pipefail

etc=${SYSTEM_ETC:-/etc}  # the tests set another one
minimum_mesa=25

say() { echo "system packages: $*"; }
warn() { echo "system packages: $*" >&2; }

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# Newer Debian and Ubuntu releases call libglib2.0-0 libglib2.0-0t64.
present() { installed "$1" || installed "$1t64"; }

mesa_version() { dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || true; }

mesa_is_new_enough() { installed mesa-vulkan-drivers && dpkg --compare-versions "$(mesa_version)" ge "$minimum_mesa"; }

# Prints apt's candidate version of Mesa's driver in the suites that are configured, or nothing.
mesa_candidate() { apt-cache policy mesa-vulkan-drivers 2>/dev/null | sed -n 's/^ *Candidate: //p'; }

codename() { sed -n 's/^VERSION_CODENAME=//p' "$etc/os-release"; }

# Prints the Debian mirror of the machine's own package lists (both of apt's formats).
mirror() {
  local address='(URIs:|deb)\s+(\[[^]]*\]\s+)?\Khttps?://\S+/debian/?(?=\s|$)'
  grep -hoP "^$address" "$etc"/apt/sources.list.d/*.sources "$etc/apt/sources.list" "$etc"/apt/sources.list.d/*.list \
    2>/dev/null | head -n 1 || true
}

# Runs a command as root; only called where `may_install` said yes.
as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi
}

may_install() { [[ $(id -u) == 0 ]] || sudo -n true 2>/dev/null; }

apt_get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@"; }

add_backports() {
  local suite source list=$etc/apt/sources.list.d/backports.list
  suite=$(codename)-backports
  if grep -qsE "(^deb|^Suites:).*\b$suite\b" "$etc/apt/sources.list" "$etc"/apt/sources.list.d/*.{list,sources}; then
    return
  fi
  source=${DEBIAN_MIRROR:-$(mirror)}
  if [[ -z $source ]]; then
    warn "no Debian mirror found in $etc/apt. Set DEBIAN_MIRROR to one that has the suite $suite."
    return 1
  fi
  say "adding the suite $suite"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $source $suite main" |
    as_root tee "$list" >/dev/null
}

install_mesa() {
  if ! dpkg --compare-versions "$(mesa_candidate)" ge "$minimum_mesa"; then
    add_backports
    apt_get update
    apt_get install -y --no-install-recommends -t "$(codename)-backports" mesa-vulkan-drivers
  else
    apt_get install -y --no-install-recommends mesa-vulkan-drivers
  fi
}

check_only=no
packages=() missing=() mesa=no
for argument in "$@"; do
  case $argument in
    --check) check_only=yes ;;
    simulators) packages+=(libx11-6 libgl1 libglib2.0-0 libegl1) mesa=yes ;;
    *) packages+=("$argument") ;;
  esac
done

if [[ ${SYSTEM_PACKAGES-} == ignore ]]; then
  exit 0
fi
if ! command -v dpkg-query >/dev/null; then
  warn "this is not Debian or Ubuntu: nothing was checked. joynexus needs the equivalents of: $*"
  exit 0
fi

for package in ${packages[@]+"${packages[@]}"}; do
  present "$package" || missing+=("$package")
done
if [[ $mesa == yes ]] && mesa_is_new_enough; then
  mesa=no
fi
if [[ ${#missing[@]} -eq 0 && $mesa == no ]]; then
  exit 0
fi

names=${missing[*]-}
if [[ $mesa == yes ]]; then
  names="${names:+$names }mesa-vulkan-drivers>=$minimum_mesa"
  names+=" (installed: $(mesa_version | grep . || echo none))"
fi
if [[ $check_only == yes ]] || ! may_install; then
  warn "missing: $names"
  warn "install them as root, with: sudo scripts/system_packages.sh $(printf '%s\n' "$@" | grep -vx -e --check | paste -sd' ')"
  warn "or go on without them, where no simulator is run, with SYSTEM_PACKAGES=ignore."
  exit 3
fi

say "installing $names"
apt_get update
if [[ ${#missing[@]} -gt 0 ]]; then
  apt_get install -y --no-install-recommends "${missing[@]}"
fi
if [[ $mesa == yes ]]; then
  install_mesa
fi
