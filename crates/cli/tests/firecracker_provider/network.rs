//! Network access of microVMs.

use std::path::Path;

use emergent_test_support::command::run;
use emergent_test_support::internet::Internet;
use emergent_test_support::server::TestServer;
use serde_json::json;

use super::{end, machine, start};

/// Whether a command in a workspace can connect to an address.
async fn reaches(server: &TestServer, id: &str, address: &str) -> bool {
    let (host, port) = address.rsplit_once(':').unwrap();
    let command = format!("timeout 10 bash -c 'exec 3<>/dev/tcp/{host}/{port}'");
    let answer = server.tool(id, "bash", json!({ "command": command })).await.ok();
    answer["exit_code"] == 0
}

#[tokio::test]
async fn workspace_has_network_access() {
    let (microvms, server) = start(&[]).await;
    let internet = Internet::start();
    let listener = internet.listen();
    let outside = listener.local_addr().unwrap().to_string();
    let id = server.create(microvms.small()).await;
    let machine = machine(&server, &id).await;
    let (interface, address) = (machine["interface"].as_str().unwrap(), machine["address"].as_str().unwrap());
    assert!(reaches(&server, &id, &outside).await, "the internet is not reached\n{}", server.log());
    // The source address is translated to one of the host, which the external host can answer.
    let (_, peer) = listener.accept().unwrap();
    assert_ne!(peer.ip().to_string(), address);
    let routes = server.bash(&id, "cat /proc/net/route; cat /sys/class/net/*/address; hostname -I").await;
    assert!(routes.contains(address), "{routes}");
    assert!(run("iptables", &["-w", "5", "-t", "nat", "-S"]).contains("MASQUERADE"));
    // The host, private networks, the metadata service and other microVMs are not reached.
    let on_host = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = on_host.local_addr().unwrap().port();
    let gateway = run("ip", &["-4", "-o", "addr", "show", "dev", interface]);
    let gateway = gateway.split_ascii_whitespace().nth(3).unwrap().split('/').next().unwrap().to_owned();
    let private = Internet::start_private();
    let private_listener = private.listen();
    let other = server.create(microvms.small()).await;
    let other_address = super::machine(&server, &other).await["address"].as_str().unwrap().to_owned();
    assert_ne!(other_address, address);
    server.start_in_background(&other, "timeout 600 perl -MIO::Socket -e '$s = IO::Socket::INET->new(LocalPort => 8000, Listen => 5); $s->accept while 1'").await;
    for closed in [
        format!("{gateway}:{port}"),
        private_listener.local_addr().unwrap().to_string(),
        "169.254.169.254:80".to_owned(),
        format!("{other_address}:8000"),
    ] {
        assert!(!reaches(&server, &id, &closed).await, "{closed} is reached");
    }
    assert!(reaches(&server, &id, &outside).await);
    server.destroy(&other).await;
    server.destroy(&id).await;
    let rules = run("iptables-save", &[]);
    assert!(!rules.contains(address), "{rules}");
    end(&microvms, server);
}

#[tokio::test]
async fn isolated_network_mode() {
    let (microvms, server) = start(&[]).await;
    let internet = Internet::start();
    let listener = internet.listen();
    let mut request = microvms.small();
    request["network"] = json!("isolated");
    let id = server.create(request).await;
    let machine = machine(&server, &id).await;
    let (interface, address) = (machine["interface"].as_str().unwrap(), machine["address"].as_str().unwrap());
    assert!(Path::new("/sys/class/net").join(interface).exists());
    // The channel works. The network has no address translation and only a local route.
    assert_eq!(server.bash(&id, "echo in touch").await, "in touch\n");
    assert!(!run("iptables-save", &["-t", "nat"]).contains(address));
    let outside = listener.local_addr().unwrap().to_string();
    assert!(!reaches(&server, &id, &outside).await);
    let routes = server.bash(&id, "cat /proc/net/route").await;
    assert_eq!(routes.lines().count(), 2, "{routes}");
    server.destroy(&id).await;
    end(&microvms, server);
}
