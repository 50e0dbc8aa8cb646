#!/bin/sh
# Run a command in an image of the lanes, with this machine's GPUs and the repository mounted as /work:
#
#   sh tools/in_image.sh cuda lockstep-lanes:cuda-sm90 python3 -m pytest --lane stage-b-1-gpu --hardware h200
#
# As the calling user, so that evidence and caches on the host belong to whoever runs the lane.
set -eu
vendor=$1
shift
gid() { getent group "$1" | cut -d: -f3; }
case "$vendor" in
cuda) set -- --gpus all "$@" ;;
rocm)
	set -- --security-opt seccomp=unconfined "$@"
	for group in video render; do
		if [ -n "$(gid "$group")" ]; then set -- --group-add "$(gid "$group")" "$@"; fi
	done
	set -- --device /dev/kfd --device /dev/dri "$@"
	;;
*)
	echo "in_image.sh: vendor $vendor: expected cuda or rocm" >&2
	exit 2
	;;
esac
# The host's IPC namespace: workers pass tensors through its shared memory, which is too small in a container's own.
exec docker run --rm --ipc=host --user "$(id -u):$(id -g)" --env HOME=/tmp --volume "$PWD:/work" "$@"
