//! How a store server takes new clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use phalanx_store::TcpStoreServer;
use phalanx_store::tcp::wire::{MAGIC, Request};

#[test]
fn clients_that_come_at_once_to_several_addresses_are_all_served() {
    let addrs: [SocketAddr; 3] =
        ["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0"].map(|addr| addr.parse().expect("an address"));
    let server = TcpStoreServer::start(&addrs, None).expect("the server starts");
    let mut clients: Vec<TcpStream> = (0..300)
        .map(|i| TcpStream::connect(server.local_addrs()[i % 3]).expect("a client connects"))
        .collect();
    for (nonce, client) in (0_u32..).zip(&mut clients) {
        let mut greeting = Vec::new();
        Request::Validate { magic: MAGIC }.encode(&mut greeting);
        Request::Ping { nonce }.encode(&mut greeting);
        client.write_all(&greeting).expect("the server reads");
    }
    for (nonce, client) in (0_u32..).zip(&mut clients) {
        let mut answer = [0; 4];
        let limit = Some(Duration::from_secs(30));
        client.set_read_timeout(limit).expect("a time limit");
        client.read_exact(&mut answer).expect("the server answers");
        assert_eq!(answer, nonce.to_le_bytes());
    }
}
